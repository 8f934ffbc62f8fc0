"""What the models of a run began with, so that a resumed run can tell others in their place.

A path does not say it: its files may be replaced, or be moved. Of weights, some rows of every
tensor are read: other weights are told, a change of a few numbers may not be.
"""

import logging

from puzzle_align.config.resolve import Job
from puzzle_align.config.saved import Saved, Start
from puzzle_align.files.json_file import as_json, differences
from puzzle_align.files.messages import shown
from puzzle_align.layout.hf_config import to_hf_config
from puzzle_align.runtime.groups.collectives import from_rank_zero, on_other_nodes
from puzzle_align.stages.weights import role_weights

_CURE = "put it back, or start anew with another output_dir"
_logger = logging.getLogger(__name__)

Starts = dict[str, Start]


def find_starts(job: Job) -> Starts:
    """By role, path, dimensions and fingerprint of what the model's weights are read from."""
    return {
        role: Start(
            path=model.path,
            model=to_hf_config(model.spec),
            weights=role_weights(model, job.config).fingerprint(whole=False).hex(),
        )
        for role, model in job.models.items()
    }


def check_nodes(job: Job) -> None:
    """Raise a one-line ValueError if a node's disk has other models than rank 0's. Collective."""
    first = from_rank_zero(lambda: find_starts(job))

    def compare() -> None:
        for role, own in find_starts(job).items():
            if own != first[role]:
                raise ValueError(
                    f"{job.models[role].key}.path: {own.path} is another model there than on"
                    " rank 0's node: copy it again"
                )

    on_other_nodes(compare)


def check_starts(job: Job, starts: Starts, saved: Saved) -> None:
    """Raise a one-line ValueError if a model of the run did not begin as ``starts`` says.

    Models whose weights are in the checkpoint go on with those: it is enough that their config
    still names what they began with, whatever is there by now.
    """
    began: Starts | None = saved.job["starts"]
    if began is None:
        _logger.warning(
            "%s is of an older version, and does not say which weights frozen models had: that they"
            " are the same is not checked",
            saved.path,
        )
        return
    for role, own in starts.items():
        was, key = began.get(role), job.models[role].key
        if was is None:
            continue
        is_saved = role in job.plan.trained or role in saved.frozen
        if is_saved and own.path == was.path:
            continue
        what = f"{key}: the {role} in {saved.path} began with"
        for name, old, new in differences("", was.model, as_json(own.model)):
            raise ValueError(
                f"{what} {shown(name)}={shown(old)}, and here is {shown(new)}: {_CURE}"
            )
        if own.weights != was.weights:
            raise ValueError(f"{what} other weights than are in {own.path} now: {_CURE}")
