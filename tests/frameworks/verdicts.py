"""Verdicts on known sources, as data: ``verdicts.json``, and the page ``docs/compatibility.md`` made of it.

    python -m tests.frameworks.verdicts                                      # write the page
    python -m tests.frameworks.verdicts "verl 0.9.1" "slime v0.4.0=~/slime@v0.4.0"   # judge and record, too
    FRAMEWORK_REPOSITORIES=~/slime:~/verl python -m tests.frameworks.verdicts --anew # all sources on record

A source is a package with its version, or NAME=REPOSITORY@REVISION. With ``--anew``, a commit that none of
the repositories has keeps its verdicts, and is named.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_rl_patches import Settings
from megatron_rl_patches.engine import registry
from megatron_rl_patches.engine.judge import judge_all
from megatron_rl_patches.engine.sources import open_source
from megatron_rl_patches.engine.statuses import SiteStatus
from tests.frameworks.checkouts import repositories
from tests.frameworks.packages import Packages, built_on
from tests.worlds.files import git

TABLE = Path(__file__).with_name("verdicts.json")

Verdicts = dict[str, dict[str, dict[str, str]]]
"""Framework -> patch -> site -> ``fits``, or another state with its reason: ``not needed: it passes …``."""


@dataclass(frozen=True)
class Known:
    """A source, and how it was judged.

    Attributes:
        source: its name; of a package ``NAME VERSION``.
        commit: ``None`` of a package.
        date: of the commit, or of the youngest file in the wheel.
    """

    source: str
    commit: str | None
    date: str
    verdicts: Verdicts

    @property
    def identity(self) -> str:
        """As runs know it."""
        return self.commit or self.source

    def judged(self) -> list[SiteStatus]:
        return [
            SiteStatus(patch, framework, site, *verdict.partition(": ")[::2])  # type: ignore[arg-type]
            for framework, patches in self.verdicts.items()
            for patch, sites in patches.items()
            for site, verdict in sites.items()
        ]

    def not_judged(self) -> list[str]:
        """Return the patches of today that have a site in this source, and are newer than its record."""
        return [
            patch.name
            for patch in registry.patches().values()
            if any(patch.name not in self.verdicts.get(site.framework, (patch.name,)) for site in patch.sites)
        ]


def load() -> list[Known]:
    return [Known(**entry) for entry in json.loads(TABLE.read_text())]


def save(table: Sequence[Known]) -> None:
    text = json.dumps([asdict(one) for one in table], indent=1, ensure_ascii=False)
    TABLE.write_text(text + "\n")


def judge(source: str) -> Verdicts:
    """Anything that ``check`` takes."""
    verdicts: Verdicts = {}
    for f in judge_all(open_source(source), registry.patches().values(), Settings()):
        if f.state != "absent":
            verdict = f.state if f.state == "fits" else f"{f.state}: {f.reason}"
            verdicts.setdefault(f.framework, {}).setdefault(f.patch, {})[f.target] = verdict
    return verdicts


def judge_release(release: str, packages: Packages) -> Known:
    wheel = packages.wheel(release)
    return Known(release, None, built_on(wheel), judge(str(wheel)))


def judge_commit(source: str, repository: str, revision: str) -> Known:
    commit = git(repository, "rev-parse", "--verify", f"{revision}^{{commit}}")
    date = git(repository, "log", "-1", "--format=%cs", commit)
    return Known(source, commit, date, judge(f"{repository}@{commit}"))


def judged_anew(known: Known, packages: Packages, repositories: Sequence[str]) -> Known | None:
    """Judge a source on record by the patches of today; ``None`` of a commit that no repository has."""
    if known.commit is None:
        return judge_release(known.source, packages)
    repository = next((one for one in repositories if has_commit(one, known.commit)), None)
    return None if repository is None else judge_commit(known.source, repository, known.commit)


def has_commit(repository: str, commit: str) -> bool:
    command = ["git", "-C", repository, "cat-file", "-e", f"{commit}^{{commit}}"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def main(sources: Sequence[str]) -> None:
    from tests.frameworks.page import PAGE, page_of_records

    table = {one.source: one for one in load()}
    with tempfile.TemporaryDirectory() as folder:
        packages = Packages(Path(folder))
        for known in load() if "--anew" in sources else ():
            anew = judged_anew(known, packages, repositories())
            if anew is None:
                print(f"{known.source} is as it was: no repository has {known.commit}")
            elif anew != known:  # else the order of the patches on record stays
                table[known.source] = anew
        for source in (source for source in sources if source != "--anew"):
            name, _, place = source.partition("=")
            if place:
                repository, _, revision = place.rpartition("@")
                table[name] = judge_commit(name, str(Path(repository).expanduser()), revision)
            else:
                table[name] = judge_release(name, packages)
    if sources:
        save(list(table.values()))
    PAGE.write_text(page_of_records())


if __name__ == "__main__":
    main(sys.argv[1:])
