"""The catalogue: its rows make sense, what fits is found smallest first, and what is wrong is named with its mend."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from dropforge.cli.app import app
from dropforge.errors import DropforgeError
from dropforge.placement.catalogue import VARIABLE, Instance, Needs, find, missing, pod_room, read, suited

ALL = read({})
HEAD = ",".join(Instance.model_fields)


def test_the_families_that_teams_use_are_there() -> None:
    names = {name.split(".")[0] for name in ALL}
    assert names >= {"p3", "p3dn", "p4d", "p4de", "p5", "p5e", "p5en", "p6-b200", "g4dn", "g5", "g6", "g6e"}
    assert names >= {"c8g", "m8g", "r8g", "c7i", "m7i", "r7i", "gpu-h100-sxm", "gpu-h200-sxm"}
    assert {name: ALL[name].adapters for name in ("p4d.24xlarge", "p5.48xlarge", "p5en.48xlarge")} == {
        "p4d.24xlarge": 4, "p5.48xlarge": 32, "p5en.48xlarge": 16,
    }  # fmt: skip
    assert {one.arch for one in ALL.values() if one.name.split(".")[0] in {"c8g", "m8g", "r8g"}} == {"arm64"}


def test_a_pod_gets_less_than_the_machine_has_and_more_of_a_larger_one() -> None:
    for one in ALL.values():
        room = pod_room(one)
        assert 0 < room.cpus < one.cpus
        assert 0 < room.memory_gib < one.memory_gib
    assert pod_room(ALL["p5.48xlarge"]).cpus > pod_room(ALL["p5.4xlarge"]).cpus


@given(
    needs=st.builds(
        Needs,
        gpus=st.integers(0, 9),
        gpu_memory_gib=st.sampled_from([0, 24, 80, 100, 200]),
        cpus=st.sampled_from([0, 3, 60, 190, 300]),
        memory_gib=st.sampled_from([0, 10, 1000, 3000]),
        arch=st.sampled_from([None, "amd64", "arm64"]),
        cloud=st.sampled_from([None, "aws", "nebius"]),
        fabric=st.sampled_from([None, "tcp", "efa", "infiniband"]),
        gpu_link=st.sampled_from([None, "nvlink"]),
        amx=st.booleans(),
    )
)
def test_what_is_found_fits_and_what_is_not_lacks_something(needs: Needs) -> None:
    if all(missing(needs, one) for one in ALL.values()):
        with pytest.raises(DropforgeError, match="none fits"):
            suited(needs, ALL.values())
        return
    found = suited(needs, ALL.values())
    for one in ALL.values():
        room = pod_room(one)
        fits = (
            one.gpus >= needs.gpus
            and (needs.gpus == 0 or one.gpu_memory_gib >= needs.gpu_memory_gib)
            and room.cpus >= needs.cpus
            and room.memory_gib >= needs.memory_gib
            and needs.arch in (None, one.arch)
            and needs.cloud in (None, one.cloud)
            and needs.fabric in (None, one.fabric)
            and needs.gpu_link in (None, one.gpu_link)
            and (one.amx or not needs.amx)
        )
        assert (one in found) == fits
    assert [one.gpus for one in found] == sorted(one.gpus for one in found)


def test_a_name_that_is_not_there_is_refused_with_the_nearest() -> None:
    with pytest.raises(DropforgeError, match=r"instance 'p5\.48xlarg'.*Did you mean p5\.48xlarge"):
        find("p5.48xlarg", ALL)
    with pytest.raises(DropforgeError, match="has 8 of 16 GPUs"):
        suited(Needs(gpus=16), ALL.values())


def test_a_file_of_ones_own_adds_and_replaces(tmp_path: Path) -> None:
    own = tmp_path / "own.csv"
    own.write_text(f"{HEAD}\nrack-1,here,amd64,64,512,H100,4,80,nvlink,100,infiniband,4,,\n"
                   "p5.48xlarge,aws,amd64,192,2048,H100,8,80,nvlink,3200,efa,31,,\n")  # fmt: skip
    found = read({VARIABLE: str(own)})
    assert found["rack-1"].adapters == 4
    assert found["p5.48xlarge"].adapters == 31
    assert len(found) == len(ALL) + 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rack,here,amd64,x,512,,,,,,,,,", r"line 2: column 'cpus'"),
        ("rack,here,sparc,1,512,,,,,,,,,", r"line 2: column 'arch'"),
        ("../rack,here,amd64,1,512,,,,,,,,,", r"line 2: column 'name'"),
        ("rack,here,amd64,1,512,H100,,,,,,,,", r"gpu, gpus and gpu_memory_gib go together"),
        ("rack,here,amd64,1,512,H100,2,80,,,,,,", r"gpu_link is for several GPUs"),
        ("rack,here,amd64,1,512,,,,,,efa,,,", r"a fabric has adapters"),
        ("rack,here,amd64,1,512,,,,,,,,,\nrack,here,amd64,1,512,,,,,,,,,", r"line 3: rack is listed twice"),
        ("rack,here,amd64,1,512,,,,,,,,,,,more", r"line 2"),
        ("rack,here", r"line 2"),
    ],
)
def test_a_wrong_file_is_named_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    own = tmp_path / "own.csv"
    own.write_text(f"{HEAD}\n{text}\n")
    with pytest.raises(DropforgeError, match=said):
        read({VARIABLE: str(own)})


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(DropforgeError, match="Name a readable CSV file"):
        read({VARIABLE: str(tmp_path)})


def test_the_command_lists_what_fits_and_its_pods() -> None:
    def typed(*words: str) -> str:
        done = CliRunner().invoke(app, ["instances", *words])
        if done.exception is not None:
            raise done.exception
        return done.stdout

    found = json.loads(typed("--gpus", "8", "--gpu-memory", "100", "--cloud", "nebius", "-o", "json"))
    assert [(one["gpu"], one["pod_cpus"]) for one in found] == [("H200", 127.1), ("B200", 159.0)]
    names, *values = (line.split("\t") for line in typed("p5.48xlarge", "-o", "tsv").splitlines())
    assert [dict(zip(names, one, strict=True))["pod_memory_gib"] for one in values] == ["1994.4"]
    head, row = typed("p5.48xlarge").splitlines()  # on one line each, however narrow the terminal is
    assert head.startswith("instance")
    assert row.startswith("p5.48xlarge")
    assert "8 x H100 80 GiB" in row
    with pytest.raises(DropforgeError, match="--arch: it should be 'amd64' or 'arm64'"):
        typed("--arch", "x86")
    with pytest.raises(DropforgeError, match="--link"):
        typed("--link", "wire")
