"""`tunix quantize`: a model's matrices rounded after its training (PTQ), by rules, and what that costs.

Rules come as words (`q_proj=int8,mlp.*=int4:64`) or from a YAML file with a list `rules`, written as in a recipe. The
folder is an ordinary one, of the size that its dtype asks for: each weight is the number that its grid holds, and
`tunix_quantization.json` beside them says which. `--packed` writes the few bits themselves. Where rows are there, the
loss is measured before, and after on the folder that was written.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tunix.commands.eval_tasks import Found, loss
from tunix.commands.evaluate import Setting, Wanted, brings_rows, prepared
from tunix.errors import UserError
from tunix.hf.model_folder import save_folder
from tunix.inference.model import InferenceModel, InferenceOptions
from tunix.models.on_grid import rounded
from tunix.models.quantization.fake_quant import Simulated, supported
from tunix.models.quantization.modules import PROJECTIONS
from tunix.models.quantization.rules import RULES_FILE, Rule, Rules
from tunix.models.quantization.schemes import check_packs
from tunix.trainer.progress import readable
from tunix.util.atomic_io import refuse_taken
from tunix.util.yaml_io import problems, read_mapping

WORD = re.compile(r"(?P<module>.+)=(?P<weights>\w+)(:(?P<tile>\d+))?(/(?P<activations>\w+))?")


def quantize(asked: InferenceOptions, out: Path, rules: str, wanted: Wanted, packed: bool = False) -> dict[str, float]:
    """Rounds, writes `out`, and prints what it cost.

    Args:
        asked: the model, or a run.
        out: the folder to write; it must not exist.
        rules: as words, or the name of a YAML file.
        wanted: the rows that the loss is measured on; a run brings its own.
        packed: writes few bits; else each weight as the number on its grid.

    Returns:
        The numbers by name: `error/q` and so on, and where there are rows `loss/before` and `loss/after`.

    Raises:
        UserError: the model or the rows are not to be had, the rules mean nothing, or `out` exists.
    """
    read = read_words(rules)
    if packed:
        check_packs(read)
    refuse_taken(out)
    measured = prepared(asked, replace(wanted, task="loss")) if wanted.data or brings_rows(asked.model) else None
    speaker = InferenceModel(asked)
    if speaker.source.rules is not None:
        raise UserError(
            f"{speaker.source.folder} is rounded already ({RULES_FILE}), and a second rounding would move its weights "
            "again: quantize the model that it was made of"
        )
    how = supported(read)
    before = None if measured is None else loss(measured.speaker, measured.table, measured.train_on)
    moved = _written(speaker, out, read, how, packed)
    found = {f"error/{name}": error for name, error in moved.items()}
    if measured is not None and before is not None:
        after = _loss_of(measured, out)
        found |= {f"loss/{when}": one.metrics["loss"].value for when, one in (("before", before), ("after", after))}
    print(_shown(asked, out, read, moved, found))
    return found


def read_words(text: str) -> Rules:
    """The rules that `--rules` says.

    Raises:
        UserError: they are not written as rules, or mean nothing.
    """
    file = Path(text).expanduser()
    sections = read_mapping(file) if file.suffix in (".yaml", ".yml") else {"rules": _of_words(text)}
    try:
        return Rules.model_validate(sections)
    except ValidationError as error:
        where = f"{file}: " if file.suffix in (".yaml", ".yml") else "--rules: "
        keys = {"": list(Rules.model_fields), "rules": list(Rule.model_fields)}
        raise UserError("\n".join(where + line for line in problems(error, keys))) from error


def _of_words(text: str) -> list[Mapping[str, Any]]:
    """`q_proj=int8,mlp.*=int4:64/int8,o_proj=none` as a recipe's rules."""
    rules: list[Mapping[str, Any]] = []
    for word in text.split(","):
        found = WORD.fullmatch(word.strip())
        if found is None:
            raise UserError(
                f"--rules: {word!r} is no rule; one is MODULE=TYPE, MODULE=TYPE:TILE or MODULE=TYPE/ACTIVATIONS, as in "
                "mlp.*=int4:64, and MODULE=none leaves modules as they are; or name a .yaml file"
            )
        rule = {key: value for key, value in found.groupdict().items() if value is not None}
        rules.append({**rule, "weights": None if rule["weights"] == "none" else rule["weights"]})
    return rules


def _written(
    speaker: InferenceModel, out: Path, rules: Rules, how: tuple[tuple[str, Simulated], ...], packed: bool
) -> dict[str, float]:
    """Writes the folder; by how much each module moved."""
    model, params, _ = speaker.weights()
    on_grid, moved = rounded(replace(model, simulated=how), params)
    to = {"source": speaker.source.files, "dtype": model.dtype, "scores": not model.has_lm_head, "rules": rules}
    save_folder(out, model.config, params if packed else on_grid, packed=packed, **to)
    return {name.split("/")[1]: error for name, error in moved.items()}


def _loss_of(before: Setting, out: Path) -> Found:
    """The loss of the written folder, of the same rows in the same rendering."""
    asked = replace(before.speaker.asked, model=str(out), adapter=None)
    return loss(InferenceModel(asked), before.table, before.train_on)


def _shown(
    asked: InferenceOptions, out: Path, rules: Rules, moved: Mapping[str, float], found: Mapping[str, float]
) -> str:
    """A line for each kind of matrix, and the losses."""
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    lines = [f"{asked.model} rounded into {out}, {asked.dtype}, {readable(size)}B"]
    chosen = rules.modules
    for theirs, name in PROJECTIONS.items():
        if name not in chosen:
            lines.append(f"  {theirs:<10} as it was")
            continue
        rule = chosen[name]
        tile = f"tiles of {rule.tile}" if rule.tile else "a scale for each output"
        inputs = f", inputs {rule.activations}" if rule.activations else ""
        lines.append(f"  {theirs:<10} {rule.weights}, {tile}{inputs}: moved by {moved[name]:.3%} (root mean square)")
    if "loss/after" in found:
        lines.append(f"held-out loss {found['loss/before']:.4f} -> {found['loss/after']:.4f} nats per token")
    return "\n".join(lines)
