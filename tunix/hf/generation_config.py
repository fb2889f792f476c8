"""generation_config.json of a folder that is written: that of the folder which training started from, and all ids at
which the trained turns end.

transformers and vLLM stop at its `eos_token_id`, and read that of config.json only where there is no such file.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from tunix.data.tokenizer import GENERATION_CONFIG, eos_ids
from tunix.models.config import Stops
from tunix.models.families.table import read_json


def write_generation_config(
    folder: Path, sources: Sequence[Path | None], stops: Sequence[int], special: Stops = ()
) -> None:
    """Writes a source's generation_config.json with every other field unchanged; only its `eos_token_id` grows.

    Args:
        folder: where it is written.
        sources: folders, of which the first that has the file is taken.
        stops: ids at which completions ended while the model was trained; without any the file is copied as it is.
        special: fields of config.json that the file begins with where no source has one, since nothing reads them
            there any more, e.g. `(("pad_token_id", 0),)`.

    Raises:
        UserError: the source's file is damaged.
    """
    files = [source / GENERATION_CONFIG for source in sources if source is not None]
    file = next((file for file in files if file.is_file()), None)
    fields = {name: list(ids) if isinstance(ids, tuple) else ids for name, ids in special}
    if file is not None:
        fields = read_json(file)
    eos = eos_ids(fields, str(file))
    if file is not None and set(stops) <= set(eos):
        shutil.copyfile(file, folder / GENERATION_CONFIG)
    elif stops:
        ids = list(dict.fromkeys((*eos, *stops)))
        fields["eos_token_id"] = ids[0] if len(ids) == 1 else ids
        (folder / GENERATION_CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
