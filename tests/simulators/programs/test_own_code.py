"""Files of the user's are imported apart: each version is another module, and hides nothing."""

import sys

import pytest

from simulators.programs.own_code import digest_of_module, is_own, read, with_neighbours


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "layers.py").write_text("WIDTH = 3\n")
    (tmp_path / "parts" / "deep").mkdir(parents=True)
    (tmp_path / "parts" / "__init__.py").write_text("")
    (tmp_path / "parts" / "one.py").write_text("from . import two\nfrom .deep.three import THREE\nimport layers\n")
    (tmp_path / "parts" / "two.py").write_text("TWO = 2\n")
    (tmp_path / "parts" / "deep" / "three.py").write_text("THREE = 3\n")
    (tmp_path / "json.py").write_text("raise RuntimeError('not imported')\n")
    (tmp_path / "mine.py").write_text(
        "import math\nimport tuners.settings as ours\nimport layers\nimport parts.one\nfrom parts import two as second\n"
        "from .layers import WIDTH\n\n\ndef later():\n    from parts.deep.three import THREE\n    return THREE\n\n\n"
        "def wrong():\n    raise ValueError('no')\n"
    )
    return tmp_path


def test_a_file_finds_what_lies_beside_it_also_later(folder):
    module = read(folder / "mine.py").module()
    assert (module.layers.WIDTH, module.WIDTH, module.second.TWO, module.later()) == (3, 3, 2, 3)
    assert module.parts.one.layers is module.layers
    assert module.ours is sys.modules["tuners.settings"]
    assert is_own(module.__name__)
    assert not {"layers", "parts", "mine"} & sys.modules.keys()
    assert not list(folder.rglob("__pycache__"))


def test_a_changed_file_and_one_of_the_same_name_elsewhere_are_other_modules(folder, tmp_path_factory):
    before = read(folder / "mine.py").module()
    assert read(folder / "mine.py").module() is before
    (folder / "layers.py").write_text("WIDTH = 4\n")  # as long as before, and within the same second
    after = read(folder / "mine.py").module()
    assert (before.layers.WIDTH, after.layers.WIDTH) == (3, 4)
    other = tmp_path_factory.mktemp("other")
    (other / "mine.py").write_text("import layers\n")
    (other / "layers.py").write_text("WIDTH = 5\n")
    assert read(other / "mine.py").module().layers.WIDTH == 5


def test_the_digest_is_of_all_files_that_are_imported(folder):
    names = {str(path.relative_to(folder)) for path in with_neighbours(folder / "mine.py")}
    assert names == {"mine.py", "layers.py", "parts/__init__.py", "parts/one.py", "parts/two.py", "parts/deep/three.py"}
    digests = {digest_of_module(folder / "mine.py")}
    for name in sorted(names):
        (folder / name).write_text((folder / name).read_text() + "# changed\n")
        digests.add(digest_of_module(folder / "mine.py"))
    (folder / "json.py").write_text("")
    digests.add(digest_of_module(folder / "mine.py"))
    assert len(digests) == len(names) + 1


def test_an_error_is_told_with_the_users_line(folder):
    code = read(folder / "mine.py")
    with pytest.raises(ValueError, match="no") as raised:
        code.module().wrong()
    assert code.line(raised.value) == "mine.py, line 15"
    (folder / "layers.py").write_text("x = 1\nWIDTH =\n")
    code = read(folder / "mine.py")
    with pytest.raises(SyntaxError) as raised:
        code.module()
    assert code.line(raised.value) == "layers.py, line 2"
    for of_file in (read, digest_of_module):
        with pytest.raises(ValueError, match=r"Cannot read .*none\.py: there is no such file\."):
            of_file(folder / "none.py")
