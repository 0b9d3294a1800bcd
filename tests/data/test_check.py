"""The check of all images: every kind of damage and oddity in one pass, and the exit code."""

import csv
import shutil

import lookalikes as look
import pytest
from commands import compose_entry, one_line, run_entry
from pictures import noise

from check import check
from proxy_anchor.cli import messages
from proxy_anchor.data.bad_images import BAD, ODD, check_images, format_findings
from proxy_anchor.data.folder import load_folder


def checked(root):
    return check_images(load_folder(root, verify_files=False))


def found(root) -> dict[str, list[str]]:
    """{kind: file names} in the order of the findings."""
    result: dict[str, list[str]] = {}
    for finding in checked(root):
        result.setdefault(finding.kind, []).append(finding.path.name)
    return result


@pytest.fixture
def plain(tmp_path):
    """Four classes of four ordinary images, split into train and test by class name."""
    for label, part in (("a", "train"), ("b", "train"), ("c", "test"), ("d", "test")):
        folder = tmp_path / part / label
        folder.mkdir(parents=True)
        for number in range(4):
            noise(64, 48, 100 * ord(label) + number).save(folder / f"{number}.jpg")
    return tmp_path


def test_ordinary_images_have_no_findings(plain):
    assert checked(plain) == []
    assert format_findings([], 16) == "checked 16 images, all can be used"


def test_missing_files_and_what_is_no_file(tmp_path):
    for number in range(6):
        noise(64, 48, number).save(tmp_path / f"{number}.png")
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "loop.png").symlink_to("loop.png")
    lines = [f"{number}.png,{number // 2},{'train' if number < 4 else 'test'}" for number in range(6)]
    lines += [f"{name}.png,2,test" for name in ("gone", "folder", "loop")]
    (tmp_path / "list.csv").write_text("\n".join(["path,label,split", *lines]))
    one_line(load_folder, None, csv_file=tmp_path / "list.csv", match=r"gone\.png \(missing\)")
    splits = load_folder(None, csv_file=tmp_path / "list.csv", verify_files=False)
    findings = check_images(splits)
    assert [(each.kind, each.path.name, each.detail) for each in findings] == [
        ("missing", "gone.png", ""),
        ("missing", "folder.png", "not a file"),
        ("missing", "loop.png", ""),
    ]


def test_odd_files_are_notes(plain):
    folder = plain / "train" / "b"
    noise(64, 48, 1).save(folder / "png.jpg", format="PNG")
    noise(64, 48, 2).convert("CMYK").save(folder / "cmyk.jpg")
    noise(64, 48, 3).convert("L").save(folder / "grey.jpg")
    noise(64, 48, 4).convert("RGBA").save(folder / "rgba.png")
    noise(64, 48, 5).save(folder / "colour_key.png", transparency=(0, 0, 0))
    noise(31, 64, 6).save(folder / "small.png")
    noise(64, 48, 9).save(folder / "upright.JPEG")
    noise(32, 160, 10).save(folder / "just.png")
    assert found(plain) == {
        "format": ["png.jpg"],
        "mode": ["cmyk.jpg", "colour_key.png", "grey.jpg", "rgba.png"],
        "small": ["small.png"],
    }


def test_same_bytes_by_what_they_contradict(plain):
    train, test = plain / "train", plain / "test"
    shutil.copy(train / "a" / "0.jpg", train / "a" / "again.jpg")
    shutil.copy(train / "a" / "1.jpg", train / "b" / "relabelled.jpg")
    (test / "a").mkdir()
    shutil.copy(train / "a" / "2.jpg", test / "a" / "leaked.jpg")
    shutil.copy(train / "a" / "3.jpg", test / "c" / "both.jpg")
    result = {each.path.name: each for each in checked(plain)}
    assert {name: each.kind for name, each in result.items()} == {
        "again.jpg": "duplicate",
        "relabelled.jpg": "contradiction",
        "leaked.jpg": "duplicate",
        "both.jpg": "contradiction",
    }
    assert result["leaked.jpg"].detail == f"as {train / 'a' / '2.jpg'} (train, class a)"


def test_parts_of_one_photograph_in_two_splits_are_said(tmp_path):
    for name in "pqrs":
        noise(200, 100, ord(name)).save(tmp_path / f"{name}.png")
    boxes = ["p.png,a,0,0,90,90,train", "p.png,b,100,0,90,90,train", "p.png,c,50,5,90,90,test", "q.png,d,,,,,test"]
    boxes += ["r.png,c,0,0,90,90,test", "r.png,d,100,0,90,90,test", "s.png,a,,,,,train", "q.png,b,0,0,50,50,train"]
    (tmp_path / "list.csv").write_text("\n".join(["path,label,x,y,w,h,split", *boxes]))
    findings = check_images(load_folder(None, csv_file=tmp_path / "list.csv"))
    assert [(each.kind, each.path.name, each.table, each.detail) for each in findings] == [
        ("split", "p.png#xywh=50,5,90,90", "query", f"as {tmp_path}/p.png#xywh=0,0,90,90 (train, class a)"),
        ("split", "q.png", "query", f"as {tmp_path}/q.png#xywh=0,0,50,50 (train, class b)"),
    ]


def test_the_command_lists_all_and_exits_with_1(tmp_path):
    look.make_cub(tmp_path / "cub")
    images = sorted((tmp_path / "cub" / "CUB_200_2011" / "images").rglob("Bird*.jpg"))
    images[0].unlink()
    images[1].write_bytes(b"")
    images[2].write_bytes(images[2].read_bytes()[:300])
    arguments = ["dataset=cub", "dataset.root=cub", "output=list.csv"]
    done = run_entry("check.py", *arguments, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    for path in images[:3]:
        assert str(path) in done.stdout
    lines = done.stdout.strip().splitlines()
    assert lines[0].startswith("data: cub, 12 train images of 4 classes, 10 query images of 4 classes")
    assert lines[-1].startswith("checked 22 images, 3 cannot be used: 1 missing, 1 empty, 1 corrupt, 10 format, ")
    rows = list(csv.DictReader((tmp_path / "list.csv").read_text().splitlines()))
    assert [row["path"] for row in rows if row["kind"] in BAD] == [str(path) for path in images[:3]]
    assert {row["kind"] for row in rows} <= {*BAD, *ODD}
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cub", "list.csv"]


def run_check(*arguments: str) -> bool:
    return check(compose_entry("check", *arguments))


def test_odd_images_alone_are_no_failure(tmp_path, capsys):
    look.make_inshop(tmp_path / "data")
    assert run_check("dataset=inshop", f"dataset.root={tmp_path / 'data'}")
    output = capsys.readouterr().out
    assert "images from img/" in output
    assert output.strip().splitlines()[-1].startswith("checked 23 images, all can be used: ")


def test_a_wrong_root_or_output_is_one_line(tmp_path):
    for number in range(8):
        look.write_picture(tmp_path / "mine" / "abcd"[number % 4] / f"{number}.jpg", number)
    mine = ["dataset=folder", f"dataset.root={tmp_path / 'mine'}"]
    for arguments, text in (
        (["dataset=sop", "dataset.root=no"], "is not a folder"),
        ([*mine, "output=no/list.csv"], "there is no folder no: make it"),
        ([*mine, f"output={tmp_path}"], "cannot be written (Is a directory)"),
    ):
        with pytest.raises(messages.USER_ERRORS) as caught:
            run_check(*arguments)
        assert text in messages.one_line(caught.value)
