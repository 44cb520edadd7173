"""The report of a training run (an HTML page), and the plot of the run's learning rates.

The plot of learning rates needs matplotlib (shardio's extra ``plot``), but not pyplot, whose state belongs to the user.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardio.files import write_whole
from shardio.pages import Markup, element, line_plot, make_page, section, table, tiles
from shardio.train.callbacks import LOG, Callback, EpochResult, StepRecord, read_figures
from shardio.train.config import TrainConfig
from shardio.train.models import plan_rates
from shardio.values import count, format_bytes, format_number
from shardio.world import find_world

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE = "report.html"

PLANNED, TAKEN = "#f3c48b", "#1b57a8"
"""The colors of planned and actual learning rates."""

SLOW_DATA = 0.1
"""The smallest share of time spent waiting for data at which the report advises looking for the cause."""

Points = list[tuple[int, float]]  # (step, value)

COLUMNS: dict[str, Callable[[EpochResult], str]] = {
    "loss": lambda result: f"{result.loss:.4f}",
    "accuracy": lambda result: f"{result.accuracy:.1%}",
    "val loss": lambda result: "–" if result.val_loss is None else f"{result.val_loss:.4f}",
    "val accuracy": lambda result: "–" if result.val_accuracy is None else f"{result.val_accuracy:.1%}",
    "images/s": lambda result: f"{result.images_per_s:,.0f}",
    "waiting for data": lambda result: f"{result.data_wait_share:.1%}",
}
"""The columns of the table of epochs, except the first column, and the text of their cells."""


class HtmlReport(Callback):
    """A callback that writes the report when training ends. A new run first removes an older report."""

    def __init__(self, directory: Path, config: TrainConfig | None = None) -> None:
        self.directory, self.config = directory, config

    def on_start(self, num_epochs: int, num_steps: int) -> None:
        if num_steps == 0:
            (self.directory / PAGE).unlink(missing_ok=True)

    def on_end(self, results: list[EpochResult]) -> None:
        write_report(self.directory, self.config)


def write_report(directory: Path, config: TrainConfig | None = None) -> Path | None:
    """Write ``report.html``, a self-contained page, from a run's log. The run may be incomplete.

    Args:
        directory: The run's directory.
        config: The settings to show on the page.

    Returns:
        The path of the page; None if there is no log.
    """
    if not (directory / LOG).exists():
        return None
    page = _make_report(directory.resolve().name, config, *read_figures(directory))
    with write_whole(directory / PAGE) as file:
        file.write(page)
    return directory / PAGE


def make_curves(records: list[StepRecord], results: list[EpochResult]) -> dict[str, dict[str, Points]]:
    """Return the curves of each plot, by name. An epoch's value is plotted at its last step."""

    def of_steps(value_of: Callable[[StepRecord], float]) -> Points:
        return [(record.step, value_of(record)) for record in records]

    def of_epochs(value_of: Callable[[EpochResult], float | None]) -> Points:
        return [(result.step, value) for result in results if (value := value_of(result)) is not None]

    return {
        "Loss": {
            "steps": of_steps(lambda record: record.loss),
            "epochs": of_epochs(lambda result: result.loss),
            "validation": of_epochs(lambda result: result.val_loss),
        },
        "Accuracy (%)": {
            "steps": [],
            "epochs": of_epochs(lambda result: 100 * result.accuracy),
            "validation": of_epochs(lambda result: None if result.val_accuracy is None else 100 * result.val_accuracy),
        },
        "Learning rate": {"steps": of_steps(lambda record: record.lr)},
        "Images per second": {
            "steps": of_steps(lambda record: record.images_per_s),
            "epochs": of_epochs(lambda result: result.images_per_s),
        },
        "Time waiting for data (%)": {
            "steps": of_steps(lambda record: 100 * record.data_wait_share),
            "epochs": of_epochs(lambda result: 100 * result.data_wait_share),
        },
    }


def _make_report(name: str, config: TrainConfig | None, records: list[StepRecord], results: list[EpochResult]) -> bytes:
    best = next((result for result in reversed(results) if result.is_best), None)
    panels = [
        section(title, line_plot(title, curves, "step"))
        for title, curves in make_curves(records, results).items()
        if any(curves.values())
    ]
    if config is not None:
        panels.append(_show_settings(config))
    parts = [
        element("p", _summarize(config, records, results, best)),
        tiles(_list_facts(records, results, best)),
        element("div", *panels, class_="panels"),
    ]
    if results:
        parts.append(_show_epochs(results, best))
    return make_page(f"Training run {name}", parts)


def _summarize(
    config: TrainConfig | None, records: list[StepRecord], results: list[EpochResult], best: EpochResult | None
) -> str:
    if not records:
        return "Nothing was logged."
    last = records[-1]
    of_all = f"{len(results)} of {count(config.epochs, 'epoch')}" if config else count(len(results), "epoch")
    sentences = [f"Completed {of_all} and {count(last.step, 'step')}."]
    if last.num_skipped:
        sentences.append(f"Skipped {count(last.num_skipped, 'step')} because a gradient was not finite.")
    if best is not None:
        loss = "loss" if best.val_loss is None else "validation loss"
        sentences.append(f"The {loss} was lowest after epoch {best.epoch}: {best.judged_by:.4f}.")
    if results and _find_wait_share(results) >= SLOW_DATA:
        sentences.append("Training often waited for data: run shardio doctor to find out why.")
    elif results:
        sentences.append("Data loading kept up with training.")
    return " ".join(sentences)


def _list_facts(
    records: list[StepRecord], results: list[EpochResult], best: EpochResult | None
) -> list[tuple[str, str]]:
    facts = []
    if best is not None:
        kind, accuracy = ("", best.accuracy) if best.val_accuracy is None else ("validation ", best.val_accuracy)
        facts.append((f"{kind}accuracy, epoch {best.epoch}", f"{accuracy:.1%}"))
    if results:
        num_images, seconds = sum(one.num_images for one in results), sum(one.train_s for one in results)
        facts.append(("images/s", f"{num_images / max(seconds, 1e-9):,.0f}"))
        facts.append(("of the time spent waiting for data", f"{_find_wait_share(results):.1%}"))
    if memory := [one.memory_allocated for one in records if one.memory_allocated is not None]:
        facts.append(("of memory in use at the peak", format_bytes(max(memory))))
    return facts


def _show_epochs(results: list[EpochResult], best: EpochResult | None) -> Markup:
    def number(kind: str, text: str, **attributes: str) -> Markup:
        return element(kind, text, class_="number", **attributes)

    headings = [number("th", name, scope="col") for name in ("epoch", *COLUMNS)]
    rows = [
        [
            number("th", f"★ {result.epoch}" if result is best else str(result.epoch), scope="row"),
            *[number("td", cell(result)) for cell in COLUMNS.values()],
        ]
        for result in results
    ]
    note = "The waiting time is that of rank 0. All other metrics cover all ranks. ★ marks the best epoch."
    return section("Epochs", element("p", note, class_="soft"), table(headings, rows))


def _find_wait_share(results: list[EpochResult]) -> float:
    return sum(one.data_wait_s for one in results) / max(sum(one.train_s for one in results), 1e-9)


def _show_settings(config: TrainConfig) -> Markup:
    changed, unchanged = dict[str, str](), dict[str, str]()
    for setting in dataclasses.fields(config):
        if setting.name != "data":
            value = getattr(config, setting.name)
            (unchanged if value == setting.default else changed)[setting.name] = format_setting(value)
    changed |= {name: format_setting(value) for name, value in config.data.items()}
    headings = ["setting", "value"]
    return section(
        "Settings",
        table(headings, changed.items()),
        element(
            "details",
            element("summary", f"{count(len(unchanged), 'setting')} with default values"),
            table(headings, unchanged.items()),
        ),
    )


def format_setting(value: Any) -> str:
    """Return the value of a setting as text.

    >>> format_setting(1e-3), format_setting((0.5, 0.25)), format_setting(True), format_setting(None)
    ('1e-3', '0.5, 0.25', 'yes', 'not set')
    """
    if value is None or value == "":
        return "not set"
    if isinstance(value, tuple):
        return ", ".join(map(format_setting, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return format_number(value) if isinstance(value, float) else str(value)


class RatePlot(Callback):
    """A callback that plots planned and actual learning rates when training ends, on rank 0.

    One actual rate is plotted for each line of the log, every ``log_every`` steps, including lines from before the run
    was resumed. The rates of ``plateau`` cannot be planned. Actual rates lag behind the plan by the steps that fp16
    skipped. They also differ from it if the number of ranks changed, because that changes the steps per epoch.

    Args:
        path: The PNG file; a missing directory is created.
        config: The settings.
        steps_per_epoch: Steps in a full epoch.

    Raises:
        ImportError: If matplotlib is missing.
    """

    def __init__(self, path: Path, config: TrainConfig, steps_per_epoch: int) -> None:
        _make_figure()  # Fail before training, not after it.
        self.path, self.directory = path, config.directory
        self.planned = None if config.schedule == "plateau" else plan_rates(config, steps_per_epoch)
        self.taken: Points = []

    def on_start(self, num_epochs: int, num_steps: int) -> None:
        records = [] if self.directory is None else read_figures(Path(self.directory))[0]
        # The log may contain steps after the checkpoint, which the run repeats.
        self.taken = [(record.step - 1, record.lr) for record in records if record.step <= num_steps]

    def on_log(self, record: StepRecord) -> None:
        self.taken.append((record.step - 1, record.lr))  # Records count steps; the plan's first step is step 0.

    def on_end(self, results: list[EpochResult]) -> None:
        if find_world().rank == 0:
            plot_rates(self.path, self.planned, self.taken)


def plot_rates(path: Path, planned: Points | None, taken: Points) -> None:
    """Plot planned and actual learning rates to a PNG file.

    Args:
        path: The file; a missing directory is created.
        planned: The planned rates, as points (step, rate) from step 0; None if there is no plan.
        taken: The actual rates, as points (step, rate).

    Raises:
        ImportError: If matplotlib is missing.
    """
    figure = _make_figure()
    axes = figure.subplots()
    if planned:
        axes.plot(*zip(*planned, strict=True), label="planned", color=PLANNED, linewidth=4.0)
    if taken:
        axes.plot(*zip(*taken, strict=True), label="taken", color=TAKEN, linewidth=1.2, marker=".", markersize=4)
    axes.set_xlabel("step")
    axes.set_ylabel("learning rate")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_whole(path) as file:
        figure.savefig(file, format="png")


def _make_figure() -> Figure:
    try:
        from matplotlib import figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install matplotlib") from error
    return figure.Figure(figsize=(10, 5), dpi=110, layout="constrained")
