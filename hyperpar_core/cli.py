"""The command line: hyperpar plan | diff | verify | new-plugin | plugins | env.

Exit codes: 0 done or equal, 1 different, 2 wrong usage, 3 refused.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

try:
    import typer
except ImportError:
    print("hyperpar's command line needs its extras: pip install 'hyperpar-core[cli]'", file=sys.stderr)
    raise SystemExit(2) from None

__all__ = ["main"]

DIFFERENT, USAGE, REFUSED = 1, 2, 3

app = typer.Typer(
    help="Plans tensor, sequence, context and expert parallelism, and proves the numbers.",
    epilog="Exit codes: 0 done or equal, 1 different, 2 wrong usage, 3 refused.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

MESH, FIGURES = "Mesh", "Bytes and memory"  # groups of options in --help

Model = Annotated[
    str,
    typer.Argument(
        help="a config file or folder or a checkpoint folder, which wins over a family of the same name; a transformers family; or"
        " module:function",
        metavar="MODEL",
        show_default=False,
    ),
]
Replicas = Annotated[int, typer.Option("--dp", min=1, metavar="N", rich_help_panel=MESH, help="replicas of the model")]
Context = Annotated[int, typer.Option("--cp", min=1, metavar="N", rich_help_panel=MESH, help="ranks that share a sequence")]
Tensor = Annotated[int, typer.Option("--tp", min=1, metavar="N", rich_help_panel=MESH, help="ranks that share each layer's matrices")]
Expert = Annotated[
    int, typer.Option("--ep", min=1, metavar="N", rich_help_panel=MESH, help="ranks that share a layer's experts, of those in the mesh")
]
Sequence = Annotated[bool, typer.Option("--sp/--no-sp", help="cut the sequence between regions where tp is active")]
LossParallel = Annotated[bool, typer.Option("--loss-parallel", help="keep logits sharded on the vocab in the loss")]
OverrideFile = Annotated[Path | None, typer.Option("--overrides", exists=True, dir_okay=False, help="an override file")]
Suggested = Annotated[
    bool, typer.Option("--suggested", help="declare what the model's family suggests for cp and ep, before --overrides")
]
Json = Annotated[bool, typer.Option("--json", help="JSON instead of text")]


@app.command()
def plan(
    model: Model,
    dp: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", rich_help_panel=MESH, help="replicas of the model (default: what --world leaves, or 1)",
            show_default=False,
        ),
    ] = None,
    cp: Context = 1,
    tp: Tensor = 1,
    ep: Expert = 1,
    sp: Sequence = True,
    loss_parallel: LossParallel = False,
    overrides: OverrideFile = None,
    world: Annotated[int | None, typer.Option(min=1, metavar="N", rich_help_panel=MESH, help="ranks in all", show_default=False)] = None,
    seq: Annotated[int, typer.Option(min=1, metavar="N", rich_help_panel=FIGURES, help="tokens of a sequence")] = 8192,
    batch: Annotated[int, typer.Option(min=1, metavar="N", rich_help_panel=FIGURES, help="sequences per dp rank")] = 1,
    what_if: Annotated[
        bool,
        typer.Option("--what-if", rich_help_panel=FIGURES, help="rank every tp x cp x ep x dp of --world by what it sends and holds"),
    ] = False,
    memory: Annotated[
        float | None,
        typer.Option(
            min=0, metavar="GIB", rich_help_panel=FIGURES, help="with --what-if: products that need more come last", show_default=False
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(dir_okay=False, metavar="FILE", help="write the plan as one page to look at", show_default=False)
    ] = None,
    as_json: Json = False,
    check: Annotated[
        bool, typer.Option("--check", help="prove every placement over fake ranks; exit code 1 if one is wrong")
    ] = False,
    write_overrides: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="write what the model's family suggests for cp and ep, and plan with it", show_default=False),
    ] = None,
) -> None:
    """What a plan does with MODEL, at its full size, without ranks or weights.

    --json prints what `diff` and `from_yaml` read; with --what-if, the products.
    """
    if what_if:
        given = [dp is not None, (cp, tp, ep) != (1, 1, 1), check, html is not None, write_overrides is not None]
        if world is None or any(given):
            _usage("--what-if tries every product: give it --world, and no degrees, --check, --html or --write-overrides")
        assert world is not None
        _what_if(model, world, batch, seq, memory, overrides, sp, loss_parallel, as_json)
        return
    if memory is not None:
        _usage("--memory is for --what-if")
    if world is not None and (world % (cp * tp) or (dp is not None and dp * cp * tp != world)):
        _usage(f"--world {world} isn't dp {'?' if dp is None else dp} x cp {cp} x tp {tp}")
    dp = dp or (world or cp * tp) // (cp * tp)
    if write_overrides is not None and write_overrides.exists():
        _usage(f"{write_overrides} exists already")
    with _reported():
        from . import Overrides, build_plan, check_plan, suggest_overrides
        from .testing.models import meta_model
        from .view.html import html_page
        from .view.terminal import print_plan

        sizes = {"dp": dp, "cp": cp, "tp": tp}
        built = meta_model(model)
        entries = Overrides.of(overrides).entries
        if write_overrides is not None:
            suggested = suggest_overrides(built, sizes, ep_size=ep)
            if not suggested.entries:
                _usage(f"nothing is suggested for {model} with cp {cp}, ep {ep}; {write_overrides} wasn't written")
            write_overrides.write_text(suggested.to_yaml(), encoding="utf-8")
            entries = suggested.entries + entries
        made = build_plan(
            built, sizes, overrides=Overrides(entries), ep_size=ep, sequence_parallel=sp, loss_parallel=loss_parallel
        )
        if html is not None:
            html.write_text(html_page(made, batch=batch, sequence=seq, dp=dp), encoding="utf-8")
        if as_json:
            typer.echo(json.dumps(made.to_data(), indent=1))
        else:
            print_plan(made, batch=batch, sequence=seq, dp=dp)
        if html is not None:
            typer.echo(f"wrote {html}", err=as_json)
        if not check:
            return
        report = check_plan(made, built, world_size=dp * cp * tp)
        typer.echo(f"check: {report.text()}", err=as_json)  # with --json, stdout is the plan
    raise typer.Exit(0 if report.ok else DIFFERENT)


def _what_if(
    model: str, world: int, batch: int, sequence: int, limit: float | None, overrides: Path | None, sp: bool, loss_parallel: bool,
    as_json: bool,
) -> None:  # fmt: skip
    with _reported():
        from .testing.models import meta_model
        from .view.terminal import print_what_if
        from .view.what_if import what_if

        report = what_if(
            meta_model(model), world, batch=batch, sequence=sequence, limit=None if limit is None else round(limit * 2**30),
            overrides=overrides, sequence_parallel=sp, loss_parallel=loss_parallel,
        )  # fmt: skip
        if as_json:
            typer.echo(json.dumps(report.to_data(), indent=1))
        else:
            print_what_if(report)
    raise typer.Exit(0 if report.choices else REFUSED)


@app.command()
def diff(
    plan_a: Annotated[Path, typer.Argument(exists=True, dir_okay=False, metavar="PLAN_A", help="from plan --json or to_yaml")],
    plan_b: Annotated[Path, typer.Argument(exists=True, dir_okay=False, metavar="PLAN_B", help="another")],
) -> None:
    """What differs between two plan files; exit code 1 if anything does."""
    with _reported():
        from . import ShardingPlan
        from . import diff as differences

        text = differences(ShardingPlan.from_yaml(plan_a), ShardingPlan.from_yaml(plan_b))
        typer.echo(text or "equal")
    raise typer.Exit(DIFFERENT if text else 0)


@app.command()
def verify(
    model: Model,
    dp: Replicas = 1,
    cp: Context = 1,
    tp: Tensor = 1,
    ep: Expert = 1,
    sp: Sequence = True,
    loss_parallel: LossParallel = False,
    overrides: OverrideFile = None,
    suggested: Suggested = False,
    dtype: Literal["float32", "float64"] = "float32",
    as_json: Json = False,
) -> None:
    """Runs MODEL (a family in its tiny version) on dp x cp x tp processes of this machine, and compares it with one process."""
    with _reported():
        from .testing.verify import verify as run

        report = run(
            model, dp=dp, cp=cp, tp=tp, ep=ep, dtype=dtype, sequence_parallel=sp, loss_parallel=loss_parallel,
            overrides=overrides, suggested=suggested,
        )  # fmt: skip
        typer.echo(report.to_json() if as_json else report.text())
    raise typer.Exit(0 if report.ok else DIFFERENT)


@app.command("new-plugin")
def new_plugin(
    name: Annotated[str, typer.Argument(help="of the distribution, such as acme-attention", show_default=False)],
    kind: Annotated[
        Literal["inner-wrapper", "local-compute", "special-handler", "lowerer", "family"],
        typer.Option(help="what it offers", show_default=False),
    ],
    out: Annotated[Path | None, typer.Option(help="the folder to make (default: NAME)", show_default=False)] = None,
) -> None:
    """Writes a distribution that offers one descriptor, with tests that it passes, to be changed into yours."""
    with _reported():
        from .new_plugin import new_plugin as write

        for path in write(name, kind, out):
            typer.echo(path)


@app.command()
def plugins(as_json: Json = False) -> None:
    """The plugins that are installed, what each registers, and why one is left out."""
    from . import plugin_report
    from .view.plugins_view import plugins_text

    _print(plugin_report, plugins_text, as_json)


@app.command()
def env(as_json: Json = False) -> None:
    """Versions, devices, backends and plugins, to be pasted into a report of a fault."""
    from .view.plugins_view import env_report, env_text

    _print(env_report, env_text, as_json)


def _print(report: Callable[[], Any], text: Callable[[Any], str], as_json: bool) -> None:
    with _reported():
        data = report()
        typer.echo(json.dumps(data, indent=1) if as_json else text(data))


def _usage(text: str) -> None:
    typer.secho(f"hyperpar: {text}", err=True)
    raise typer.Exit(USAGE)


@contextmanager
def _reported() -> Iterator[None]:
    """hyperpar's own errors as text with an exit code, others as they are."""
    from .errors import HyperparError

    try:
        yield
    except HyperparError as error:
        known = type(error) is not HyperparError  # the base class itself: MODEL names nothing
        typer.secho(f"{type(error).__name__}: {error}" if known else f"hyperpar: {error}", err=True)
        raise typer.Exit(REFUSED if known else USAGE) from None


def main() -> None:
    """The console script. What libraries say on the way is left out: only hyperpar's own words are printed."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.simplefilter("ignore")
    app(prog_name="hyperpar")


if __name__ == "__main__":
    main()
