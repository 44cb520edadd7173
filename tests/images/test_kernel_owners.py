"""Which users' compiled functions are loaded, and which users may load them."""

from __future__ import annotations

import logging
import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from shardio.files import UntrustedError
from shardio.images.kernel import building, finding, loading
from shardio.images.kernel.cache_files import object_name, pack
from tests.images.kernel_machines import WITHOUT_BUILT, _not_built, folder, object_path, run
from tests.test_trust import OTHER_USER, as_root, mode_of, umask

__all__ = ["_not_built", "folder"]


@pytest.fixture
def path(folder: Path, _not_built: None) -> Path:
    """An object file that is intact."""
    folder.mkdir(parents=True)
    path = folder / object_name()
    path.write_bytes(pack(object_path().read_bytes()))
    return path


@pytest.mark.parametrize("which", ["file", "folder"])
def test_functions_that_other_users_may_write_to_are_not_loaded_but_compiled_again(
    path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    others = path if which == "file" else path.parent
    others.chmod(0o777)
    assert loading.load_functions() is None
    assert f"the {which} {others} belongs to" in str(finding.why_no_kernel())
    code = object_path().read_bytes()
    monkeypatch.setattr(building, "_compile", lambda: code)
    with umask(0o077):
        building.build()
    assert {mode_of(file) for file in path.parent.iterdir() if file.suffix != ".lock"} == {0o644}
    assert mode_of(path.parent) == 0o755
    assert loading.load_functions() is not None
    assert finding.find_kernel() is not None


@as_root
def test_in_another_users_folder_nothing_is_loaded_or_compiled_and_one_warning_says_why(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    os.chown(path.parent, OTHER_USER, -1)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("it must not be written there"))
    with caplog.at_level(logging.WARNING, "shardio"):
        finding.prepare_kernel()
    assert finding.find_kernel() is None
    (record,) = caplog.records
    reason = f"{path.parent} belongs to uid {OTHER_USER} and has mode 0755"
    for part in (reason, "uses libjpeg-turbo", "XDG_CACHE_HOME", "python -m shardio.images.kernel --system"):
        assert part in record.getMessage()
    with pytest.raises(UntrustedError, match=reason):
        building.build()


PREPARE_FOR_ALL = """
import os, runpy, sys
from pathlib import Path
from shardio.images.kernel import building, cache_files, finding, __main__
system, code = Path(sys.argv[1]), Path(sys.argv[2]).read_bytes()
if loading.find_targets() == []:
    import numba
cache_files.site_cache_path = lambda name: system / name
building._compile = lambda: code
os.umask(0o077)
sys.argv[1:] = ["--system"]
runpy.run_module("shardio.images.kernel", run_name="__main__")
os.setgroups([])
os.setgid(12345)
os.setuid(12345)
finding._finder = finding._Finder()
print(finding.find_kernel() is not None, os.listdir(os.environ["XDG_CACHE_HOME"]))
"""


@as_root
@pytest.mark.parametrize("is_built", [True, False])
def test_what_root_prepares_for_all_users_is_used_by_another_user(is_built: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        if not all(mode_of(folder) & 0o001 for folder in root.parents):
            pytest.skip("other users cannot reach the folder for temporary files")
        root.chmod(0o755)
        for folder in ("user", "system"):
            (root / folder).mkdir()
            (root / folder).chmod(0o755)
        begin = "from shardio.images.kernel import loading\n" if is_built else WITHOUT_BUILT
        output, errors = run(begin + PREPARE_FOR_ALL, root / "user", root / "system", object_path())
        published = root / "system" / "shardio" / "kernels"
        files = [file for file in published.iterdir() if file.suffix != ".lock"]
        assert sorted(file.suffix for file in files) == [".check"] if is_built else [".check", ".kernel"]
        assert {mode_of(file) for file in files} == {0o644}
        assert [mode_of(folder) for folder in (published, published.parent)] == [0o755, 0o755]
        first, second = output.splitlines()
        assert first.endswith(f"its check is in {published}")
        assert second == "True []", errors
