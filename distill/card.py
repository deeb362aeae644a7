"""The README.md that lies beside a draft: what it is for, how it was made, how it does."""

from __future__ import annotations

from typing import Any

_DATA_FLAGS = ("answer_tokens", "shards", "held_out_prompts", "max_answer_tokens")
_SHOWN = (1, 2, 3, 4, 8)


def card(config: dict[str, Any], num_bytes: int) -> str:
    """Markdown out of a draft's config.json."""
    target, recipe, data = config["target"], config["recipe"], config["data"]
    lines = [
        f"# A draft for {target['name']}",
        "",
        f"{recipe['layers']} layers and a head over {recipe['head_tokens']:,} of the target's {target['vocab_size']:,} "
        f"tokens, {num_bytes / 1e6:.1f} MB in int8; embedding and head rows are the target's own. Made by "
        "`tandem distill` (docs/distill.md), used by `tandem up --draft FOLDER`. It changes no token, only how fast "
        "they come.",
        "",
        "## How it does",
        "",
        "Accepted draft tokens per step by draft length k, on answers to held-out prompts: their families of questions "
        "and their words are in no training prompt. Simulated block by block on the target's own answers; behind a "
        "lookup: where the last two, three or five tokens stood before, what followed there is guessed instead.",
        "",
        "| T | guesses right | " + " | ".join(f"k = {k}" for k in _SHOWN) + " |",
        "|---|---|" + "---|" * len(_SHOWN),
    ]
    for one in config["acceptance"]:
        for name, values in (("alone", one["alone"]), ("behind a lookup", one["with_lookup"])):
            numbers = " | ".join(f"{_at(values, k):.2f}" for k in _SHOWN)
            right = f"{one['top_1']:.1%}" if name == "alone" else ""
            lines.append(f"| {one['temperature']:g}, {name} | {right} | {numbers} |")
    for one in config["acceptance"]:
        odds = ", ".join(f"{share:.0%}" for share in one["by_position"])
        lines += ["", f"By position, given that those before were right, at T = {one['temperature']:g}: {odds}."]
    lines += [
        "",
        "## How it was made",
        "",
        f"{data.get('answer_tokens', 0):,} tokens of the target's own answers, {recipe['steps']:,} steps:",
        "",
        "```",
        _command(recipe, data),
        "```",
        "",
        "Everything that decides the result:",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in recipe.items()),
        *(f"| {name} | {value} |" for name, value in data.items() if name != "seed"),
        f"| target embedding_sha256 | {target['embedding_sha256']} |",
    ]
    return "\n".join(lines) + "\n"


def _command(recipe: dict[str, Any], data: dict[str, Any]) -> str:
    """What makes it again."""
    names = ("steps", "batch_tokens", "learning_rate", "seed")
    flags: dict[str, Any] = {"target": "TARGET", "out": "FOLDER"}
    if recipe.get("start_from"):
        flags["start_from"] = "BASE"  # which decides the layers
    else:
        flags["layers"] = recipe["layers"]
    flags["head_tokens"] = recipe["head_tokens"]
    flags |= {name: recipe[name] for name in names if name in recipe}
    flags |= {name: data[name] for name in _DATA_FLAGS if name in data}
    return "tandem distill " + " \\\n    ".join(f"--{name.replace('_', '-')} {value}" for name, value in flags.items())


def _at(values: dict[Any, float], k: int) -> float:
    return float(values.get(k, values.get(str(k), 0.0)))
