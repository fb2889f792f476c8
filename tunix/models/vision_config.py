"""The sizes of the tower that turns pictures into soft tokens, and how the decoder reads these.

Axes: Dt width of a tower, Ft ffn width of a tower, Lt layers of a tower, Nt heads of a tower, Ht head dim of a tower,
Pp patches, Pr rows of a patch, Pc columns of a patch, Rb colours, So soft tokens.
"""

from dataclasses import dataclass

COLOURS = 3
FRAMES = 2
"""Frames of a film that a patch of Qwen's tower spans; a picture is read as so many equal ones."""
ROPE_THETA = 10_000.0
"""Base of the frequencies by which the patches of Qwen's tower turn."""


@dataclass(frozen=True)
class VisionConfig:
    """A tower (`models/vision.py`) and the soft tokens that it makes."""

    tower: str
    """Its name in `TOWERS`, e.g. `siglip`."""
    width: int
    """Dt, e.g. 1152."""
    ffn: int
    """Ft, e.g. 4304."""
    num_layers: int
    """Lt, e.g. 27."""
    num_heads: int
    """Nt, e.g. 16."""
    patch: int
    """Pixels of a patch's side, e.g. 14."""
    pool: int
    """Patches of a side of the square that a soft token stands for, e.g. 4."""
    positions: int
    """Learned positions of patches along a side, e.g. 64."""
    norm_eps: float
    tokens: int
    """So: soft tokens of a picture at most, e.g. 256."""
    begin_id: int
    """The id of the token before a picture's, e.g. 255999."""
    end_id: int
    """The id of the token after them, e.g. 256000."""
    soft_id: int
    """The id that stands for each of them, e.g. 262144."""
    film_id: int | None = None
    """The id that would stand for parts of a film, e.g. 248057, which an export repeats; None where there is none."""
    any_shape: bool = False
    """Whether pictures keep their proportions; else all become squares of `side` pixels."""
    sees_ahead: bool = True
    """Whether the decoder's tokens of a picture see the later ones of it."""
    turns: bool = False
    """Whether the decoder's rope turns its tokens by their rows and columns (`Rope.sections`)."""

    @property
    def head_dim(self) -> int:
        """Ht."""
        return self.width // self.num_heads

    @property
    def patches(self) -> int:
        """Pp: patches of a picture at most."""
        return self.tokens * self.pool**2

    @property
    def side(self) -> int:
        """Pixels of a side of a picture, where all are squares of one size, e.g. 896."""
        return self.positions * self.patch

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(Pp, Pr, Pc, Rb), the shape of a picture's patches."""
        return (self.patches, self.patch, self.patch, COLOURS)
