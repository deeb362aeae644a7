"""What `tandem up --demo` shows once the cluster serves: one real completion, and how to call it."""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tandem_client import Message, TandemClient, TandemError

_QUESTION = "What is a tandem? Answer in one sentence."
_TEXT = "Two riders on one bicycle"
_MAX_TOKENS = 64


async def show(console: Console, gateway: str, scheduler: str, model: str) -> None:
    """Stream a completion to the console, then the ways to call. An error is shown, not raised: the cluster serves."""
    console.print()
    try:
        await _complete(console, gateway, model)
    except TandemError as error:
        console.print(Text(f"the demonstration failed: {error.code.name}: {error.message}", style="red"))
    # Printed as it is, so that a line can be copied whole from a terminal of any width.
    console.rule("How to call it")
    console.print(Text(calls(gateway, scheduler, model)))
    console.rule()


async def _complete(console: Console, gateway: str, model: str) -> None:
    async with TandemClient(gateway) as client:
        chat = (await client.model(model)).chat
        prompt = [Message("user", _QUESTION)] if chat else _TEXT
        console.print(Text(f"{model} › ", style="bold"), Text(_QUESTION if chat else _TEXT), sep="")
        start = time.monotonic()
        num_tokens = 0
        async for chunk in client.stream(prompt, model=model, max_tokens=_MAX_TOKENS, temperature=0.0):
            console.out(chunk.text, end="", highlight=False)
            num_tokens += sum(len(delta.token_ids) for delta in chunk.deltas)
        seconds = time.monotonic() - start
    console.print(f"\n[dim]{num_tokens} tokens in {seconds:.2f} s ({num_tokens / seconds:.1f} tokens/s)[/dim]\n")


def _activation() -> str:
    """What another terminal needs first, where the `tandem` command isn't on everybody's path."""
    script = Path(sys.prefix) / "bin" / "activate"
    if shutil.which("tandem") is not None or not script.exists():
        return ""
    return f"first      source {shlex.quote(str(script))}\n\n"


def calls(gateway: str, scheduler: str, model: str) -> str:
    """Ways to call the cluster, ready to paste."""
    return f"""\
{_activation()}tandem     tandem generate --target {gateway} --prompt "Once upon a time" --max-tokens 64 --stream
           tandem chat --target {gateway}
           tandem status --scheduler {scheduler}

Python     from tandem_client import SyncTandemClient
           with SyncTandemClient("{gateway}") as client:
               print(client.generate("Once upon a time", max_tokens=64).text)

grpcurl    grpcurl -plaintext -d '{{"text": "Once upon a time", "stop": {{"max_tokens": 64}}}}' \\
               {gateway} tandem.v1.GenerationService/GenerateStream

Node       const grpc = require("@grpc/grpc-js");        // npm install @grpc/grpc-js @grpc/proto-loader
           const loader = require("@grpc/proto-loader");
           const {{ tandem }} = grpc.loadPackageDefinition(loader.loadSync(
               "tandem/v1/generation.proto", {{ includeDirs: ["protos"], keepCase: true }}));
           new tandem.v1.GenerationService("{gateway}", grpc.credentials.createInsecure())
               .GenerateStream({{ model: "{model}", text: "Once upon a time", stop: {{ max_tokens: 64 }} }})
               .on("data", (answer) => answer.deltas.forEach((delta) => process.stdout.write(delta.text)));"""
