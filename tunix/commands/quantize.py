"""`tunix quantize`: rounds a model's matrices after training (PTQ) by rules, and measures the error.

Rules are words (`q_proj=int8,mlp.*=int4:64`) or a YAML file with a list `rules`, written as in a recipe. The output is
an ordinary model folder in the given dtype, whose weights are the rounded values, with the rules in
`tunix_quantization.json`. `--packed` writes the few bits themselves. With rows, the loss is measured before rounding,
and afterwards on the written folder.
"""

import re
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from tunix.commands.evaluate import EvalOptions, loss, prepare
from tunix.errors import UserError
from tunix.hf.model_folder import save_folder
from tunix.inference.model import InferenceModel, InferenceOptions
from tunix.models.model import rounded
from tunix.models.quantization.formats import supported
from tunix.models.quantization.modules import projections_of
from tunix.models.quantization.rules import RULES_FILE, Rule, Rules
from tunix.models.quantization.schemes import check_packs
from tunix.recipe.recipe import recipe_of_run
from tunix.trainer.progress import readable
from tunix.util.atomic_io import refuse_taken
from tunix.util.yaml_io import problems, read_mapping

WORD = re.compile(r"(?P<module>.+)=(?P<weights>\w+)(:(?P<tile>\d+))?(/(?P<activations>\w+))?")


def quantize(
    options: InferenceOptions, out: Path, rules: str, eval_options: EvalOptions, packed: bool = False
) -> dict[str, float]:
    """Rounds a model, writes `out`, and prints the errors.

    Args:
        options: the model, or a run.
        out: the folder to write; it must not exist.
        rules: as words, or the name of a YAML file.
        eval_options: the rows that the loss is measured on; by default a run's held-out rows.
        packed: stores weights in few bits; else in the dtype of the model.

    Returns:
        The numbers by name: `error/q` and so on, and with rows `loss/before` and `loss/after`.

    Raises:
        UserError: the model or the rows are not accessible, the rules are invalid, or `out` exists.
    """
    parsed = read_words(rules)
    if packed:
        check_packs(parsed)
    refuse_taken(out)
    setting, run = None, recipe_of_run(options.model)
    if eval_options.data or (run and run.algorithm.reads.is_text and (run.data.eval or run.data.eval_split)):
        setting = prepare(options, replace(eval_options, task="loss"))
    inference = InferenceModel(options)
    if inference.source.rules is not None:
        raise UserError(
            f"{inference.source.folder} is rounded already ({RULES_FILE}), and a second rounding would move its "
            "weights again: quantize the model that it was made of"
        )
    simulated = supported(parsed)
    before = None if setting is None else loss(setting)
    model, params, _ = inference.weights()
    on_grid, errors = rounded(replace(model, simulated=simulated), params)
    save_folder(
        out,
        model.config,
        params if packed else on_grid,
        packed=packed,
        source=inference.source.files,
        dtype=model.dtype,
        scores=not model.has_lm_head,
        rules=parsed,
        base=inference.source.folder,
    )
    del params, on_grid  # the written folder is read next
    moved = {name.split("/")[1]: error for name, error in errors.items()}
    numbers = {f"error/{name}": error for name, error in moved.items()}
    if setting is not None and before is not None:
        # The written folder, on the same rows with the same rendering.
        written = InferenceModel(replace(setting.inference.options, model=str(out), adapter=None))
        numbers["loss/before"] = before.metrics["loss"].value
        numbers["loss/after"] = loss(replace(setting, inference=written)).metrics["loss"].value
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    print(f"{options.model} rounded into {out}, {options.dtype}, {readable(size)}B")
    for theirs, ours in projections_of(inference.source.decoder).items():
        if (rule := parsed.modules.get(ours[0])) is None:
            print(f"  {theirs:<10} as it was")
            continue
        tile = f"tiles of {rule.tile}" if rule.tile else "a scale for each output"
        inputs = f", inputs {rule.activations}" if rule.activations else ""
        furthest = max(moved[name] for name in ours)
        print(f"  {theirs:<10} {rule.weights}, {tile}{inputs}: moved by {furthest:.3%} (root mean square)")
    if "loss/after" in numbers:
        print(f"held-out loss {numbers['loss/before']:.4f} -> {numbers['loss/after']:.4f} nats per token")
    return numbers


def read_words(text: str) -> Rules:
    """Parses `--rules`: words such as `q_proj=int8,mlp.*=int4:64/int8,o_proj=none`, or the name of a YAML file.

    Raises:
        UserError: they are not written as rules, or are invalid.
    """
    file, where = Path(text).expanduser(), "--rules: "
    if file.suffix in (".yaml", ".yml"):
        sections, where = read_mapping(file), f"{file}: "
    else:
        rules = []
        for word in text.split(","):
            if (match := WORD.fullmatch(word.strip())) is None:
                raise UserError(
                    f"--rules: {word!r} is no rule; one is MODULE=TYPE, MODULE=TYPE:TILE or MODULE=TYPE/ACTIVATIONS, "
                    "as in mlp.*=int4:64, and MODULE=none leaves modules as they are; or name a .yaml file"
                )
            rule = {key: value for key, value in match.groupdict().items() if value is not None}
            rules.append({**rule, "weights": None if rule["weights"] == "none" else rule["weights"]})
        sections = {"rules": rules}
    try:
        return Rules.model_validate(sections)
    except ValidationError as error:
        keys = {"": list(Rules.model_fields), "rules": list(Rule.model_fields)}
        raise UserError("\n".join(where + line for line in problems(error, keys))) from error
