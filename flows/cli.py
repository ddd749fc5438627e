"""The command line `trinity-flows`. Owns arguments, output and exit codes; everything else is in the flows.

Exit codes: 0 good, 1 failed, 2 wrong usage or config, 3 starved of data, 130 cancelled. Heavy modules are imported by
the commands that need them, so that --help answers at once.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from engines.errors import ConfigError, StarvedError, TrinityFlowsError
from trinity_tasks.browse.names import COLUMNS

FAILED, USAGE, STARVED, CANCELLED = 1, 2, 3, 130
STARTED = time.monotonic()

app = typer.Typer(
    name="trinity-flows",
    help="Reinforcement fine-tuning of language models as a Prefect flow. Running a command again resumes it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigOption = Annotated[Path, typer.Option("-c", "--config", help="YAML file of the job.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="Override one key, e.g. --set trainer.total_steps=200. Repeatable.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, nothing else.")]
UrlArgument = Annotated[str, typer.Argument(help="Folder or URL of the job, as the run printed it.")]
COLUMNS_HELP = (
    f"Columns: {', '.join(f'{name} ({column.meaning})' for name, column in COLUMNS.items())}, info_x and metrics_x "
    "(key x of the row's info or metrics, with _ for what is no letter or digit)."
)


@app.command()
def finetune(config: ConfigOption, set_: SetOption = None, as_json: JsonOption = False) -> None:
    """Run the stages of a config one after another, and show what was learnt."""
    _run_flow("finetune", config, set_, as_json)


@app.command()
def train(config: ConfigOption, set_: SetOption = None, as_json: JsonOption = False) -> None:
    """Train one job to its end."""
    _run_flow("train", config, set_, as_json)


@app.command()
def explore(config: ConfigOption, set_: SetOption = None, as_json: JsonOption = False) -> None:
    """Write experiences for a trainer that runs elsewhere (mode: train)."""
    _run_flow("explore", config, set_, as_json)


@app.command()
def evaluate(config: ConfigOption, set_: SetOption = None, as_json: JsonOption = False) -> None:
    """Measure a job's last checkpoint on its evaluation task sets."""
    _run_flow("evaluate", config, set_, as_json)


@app.command()
def compare(
    config: Annotated[list[Path], typer.Option("-c", "--config", help="YAML file of a job. Repeatable.")],
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show several jobs side by side: steps, accuracy before and after, where the checkpoint is."""
    _run_flow("compare", config, set_, as_json)


@app.command()
def show(job_url: UrlArgument, as_json: JsonOption = False) -> None:
    """Where a job stands: commits, step, evaluations, experiences."""
    from flows.output import print_job
    from trinity_tasks.inspection import describe

    state = describe(job_url)
    if as_json:
        _print_json(state.model_dump(mode="json"))
    else:
        print_job(state)


@app.command()
def verify(job_url: UrlArgument, as_json: JsonOption = False) -> None:
    """Check that every object of every commit is present, has the right size and hash, and can be read."""
    from trinity_tasks.inspection import verify as find_problems

    problems = find_problems(job_url)
    if as_json:
        _print_json({"url": job_url, "ok": not problems, "problems": problems})
    else:
        typer.echo("\n".join(problems) or f"{job_url}: every object of every commit is present and right")
    if problems:
        raise typer.Exit(FAILED)


@app.command()
def ledger(
    job_url: UrlArgument,
    step: Annotated[int, typer.Option("--step", min=1, help="Train step.")],
    as_json: JsonOption = False,
) -> None:
    """Which experiences trained a step."""
    from flows.output import print_ledger
    from trinity_tasks.inspection import trace_step

    entry = trace_step(job_url, step)
    if as_json:
        _print_json(entry)
    else:
        print_ledger(entry)


@app.command(epilog=COLUMNS_HELP)
def experiences(
    job_url: UrlArgument,
    buffer: Annotated[
        str | None, typer.Option("--buffer", help="Buffer of the job; that of its trainer if not given.")
    ] = None,
    where: Annotated[
        str | None,
        typer.Option(
            "--where",
            help="Only rows that meet this condition, a pandas query: comparisons, arithmetic, in, and, or, not. "
            '"reward > 0.5 and model_version >= 3 and response_length < 20", "\'sun\' in prompt", '
            '"reward is None". Columns: see below.',
        ),
    ] = None,
    samples: Annotated[
        int, typer.Option("--samples", min=0, help="How many rows to show, from low to high reward.")
    ] = 5,
    png: Annotated[str | None, typer.Option("--png", help="New file or URL for a picture of the rewards.")] = None,
    export: Annotated[
        str | None, typer.Option("--export", help="New file or URL for the rows, .parquet (a shard) or .jsonl.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """What lies in an experience buffer: how much, by which policy, with which rewards; sample rows; a copy of them."""
    from flows.experiences_page import look, print_report

    answer = look(job_url, buffer, where, num_samples=samples, png=png, export_to=export)
    if as_json:
        _print_json(answer.model_dump(mode="json"))
    else:
        print_report(answer)
    if answer.damaged:
        raise typer.Exit(FAILED)


@app.command()
def algorithms(
    name: Annotated[
        str | None, typer.Argument(help="An algorithm, a part such as kl_loss_fn.k2, or your own as module:NAME.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the algorithms; or show one: formula, parameters, what it needs, where it differs from Trinity-RFT."""
    from engines.algorithms.describe import Listing, describe, listing
    from flows.algorithms_page import print_list, print_page

    page = describe(name) if name else listing()
    if as_json:
        _print_json(page.model_dump(mode="json"))
    elif isinstance(page, Listing):
        print_list(page)
    else:
        print_page(page)


def _run_flow(name: str, path: Path | list[Path], overrides: list[str] | None, as_json: bool) -> None:
    """Load the config, run the flow embedded or on the server that PREFECT_API_URL names, exit as it ended."""
    from flows import environment
    from flows.embedded_server import EmbeddedServer
    from flows.environment import preload, set_defaults
    from flows.signals import ENDED_AT_ONCE, end_on_signals

    end_on_signals(CANCELLED, _error_object("Cancelled", ENDED_AT_ONCE, CANCELLED).encode() if as_json else b"")
    set_defaults()
    environment.COMMAND_STARTED = STARTED
    server = EmbeddedServer.start()
    from trinity_tasks.config_source import load_config

    paths = path if isinstance(path, list) else [path]
    configs = [load_config(each, overrides or ()) for each in paths]
    if name in ("train", "explore"):
        configs[0].require_one_job(name)
    server.announce()
    modules = () if name == "compare" else ("torch", "transformers", "mlflow", "reasoning_gym")
    loading = preload(*modules)
    from importlib import import_module

    from flows.output import json_result, print_result, quiet

    flow: Callable[..., Coroutine[Any, Any, Any]] = getattr(import_module(f"flows.{name}"), name)
    argument = configs if isinstance(path, list) else configs[0]
    server.wait_until_ready()
    loading.join()
    with quiet(as_json):
        state = asyncio.run(_flow_state(flow(argument, return_state=True)))
        result: Any = None if state.is_cancelled() else asyncio.run(state.aresult(raise_on_failure=False))
    if state.is_cancelled():
        _end("Cancelled", state.message, CANCELLED)
    if isinstance(result, BaseException) or not state.is_completed():
        _fail(result if isinstance(result, BaseException) else TrinityFlowsError(state.message or state.name))
    if as_json:
        _print_json(json_result(name, result))
    else:
        print_result(name, result)


async def _flow_state(call: Coroutine[Any, Any, Any]) -> Any:
    """What the flow ended as. Raises TrinityFlowsError if the Prefect server cannot be told."""
    from httpx import HTTPError
    from prefect.exceptions import TerminationSignal
    from prefect.settings import get_current_settings

    try:
        return await call
    except TerminationSignal as error:  # Prefect's own handler, when a second signal came while the run was closing
        raise KeyboardInterrupt from error
    except SystemExit as error:
        raise TrinityFlowsError(
            f"something in the run, not the command itself, called sys.exit({error.code!r}); it must raise an error"
        ) from error
    except (HTTPError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not str(error).startswith("Failed to reach API"):
            raise
        raise TrinityFlowsError(
            f"the Prefect server {get_current_settings().api.url} does not answer ({type(error).__name__}: {error}); "
            "what is committed stays: see to the server and run the command again"
        ) from error


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")


def _fail(error: BaseException) -> NoReturn:
    """Print what went wrong and exit with the code for it; a traceback only for what nobody foresaw."""
    if not isinstance(error, TrinityFlowsError):
        traceback.print_exception(error)
    code = USAGE if isinstance(error, ConfigError) else STARVED if isinstance(error, StarvedError) else FAILED
    _end(type(error).__name__, str(error), code)


def _end(kind: str, message: str, code: int) -> NoReturn:
    """Say why there is no result, with --json also as its one object, and exit."""
    typer.echo(f"{kind}: {message}", err=True)
    if "--json" in sys.argv:
        sys.stdout.write(_error_object(kind, message, code))
    raise _Ended(code)


class _Ended(SystemExit):
    """An end of which everything has been said."""


def _error_object(kind: str, message: str, code: int) -> str:
    return json.dumps({"error": {"type": kind, "message": message, "exit_code": code}}) + "\n"


def main() -> None:
    """Entry point of the console script."""
    if not sys.flags.safe_path:
        sys.path.append("")  # the working folder, for `reward_fn: my_rewards:f`; last: no file there hides a module
    try:
        app()
    except _Ended:
        raise
    except SystemExit as error:
        if error.code == USAGE and "--json" in sys.argv:
            sys.stdout.write(_error_object("UsageError", "the arguments are wrong: see standard error", USAGE))
        raise
    except KeyboardInterrupt:
        _end("Cancelled", "interrupted", CANCELLED)
    except Exception as error:  # the top of the command line: every error becomes a message and an exit code
        _fail(error)
    finally:
        gc.freeze()  # else the interpreter visits all of torch and Prefect once more before it ends: seconds


if __name__ == "__main__":
    main()
