"""Host files, host lists and Slurm's lists: what is taken, and how each mistake is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from spectrain.launch.hosts import (
    Host,
    devices_of,
    parse_host_file,
    parse_host_list,
    read_host_file,
    slots_of,
    slurm_hosts,
)
from spectrain.protocol.errors import ExitCode, HostError

# -- what is taken ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("node1", Host("node1", line=1)),
        ("node1 slots=4", Host("node1", slots=4, line=1)),
        ("node1 slots = 4", Host("node1", slots=4, line=1)),
        ("node1\tSlots= 4", Host("node1", slots=4, line=1)),
        ("node1:4", Host("node1", slots=4, line=1)),
        ("node1 slots=22", Host("node1", slots=22, line=1)),
        ("ada@node1", Host("node1", user="ada", line=1)),
        ("ada.b-c+d@node1:2", Host("node1", user="ada.b-c+d", slots=2, line=1)),
        ("node1 gpus=2,3", Host("node1", gpus=(2, 3), line=1)),
        ("node1 gpus = 2, 3 slots=2", Host("node1", gpus=(2, 3), slots=2, line=1)),
        ("node1 slots=4 max_slots=8", Host("node1", slots=4, line=1)),
        ("node1 max-slots = many", Host("node1", line=1)),
        ("10.0.0.1:4", Host("10.0.0.1", slots=4, line=1)),
        ("[fe80::1]:4", Host("fe80::1", slots=4, line=1)),
        ("ada@[::1] slots=2", Host("::1", user="ada", slots=2, line=1)),
        ("[fe80::1%eth0.5]", Host("fe80::1%eth0.5", line=1)),
        ("gpu_box-7.example.org.", Host("gpu_box-7.example.org.", line=1)),
        ("  node1  # the big one", Host("node1", line=1)),
        ("node1#the big one", Host("node1", line=1)),
    ],
)
def test_every_form_of_a_line_is_read(line: str, expected: Host) -> None:
    assert parse_host_file(line, "hosts.txt") == (expected,)


def test_a_file_keeps_its_order_and_line_numbers() -> None:
    text = "\ufeff# cluster\r\n\r\nnode2 slots=1\r\n   \r\nnode1:3 # fast\r\nnode3"
    assert parse_host_file(text, "hosts.txt") == (
        Host("node2", slots=1, line=3),
        Host("node1", slots=3, line=5),
        Host("node3", line=6),
    )


def test_a_list_reads_the_same_hosts_as_a_file() -> None:
    text = "node1:4, ada@node2,[fe80::1]:2"
    assert parse_host_list(text) == parse_host_file(text.replace(",", "\n"), "hosts.txt")


def test_a_host_file_is_read_from_disk(tmp_path: Path) -> None:
    path = tmp_path / "hosts.txt"
    path.write_bytes("\ufeffnode1 slots=2\r\n".encode())
    assert read_host_file(path) == (Host("node1", slots=2, line=1),)


def test_ssh_gets_user_and_name() -> None:
    assert Host("node1").destination == "node1"
    assert Host("node1", user="ada").destination == "ada@node1"


@pytest.mark.parametrize("name", ["localhost", "LOCALHOST", "127.0.0.1", "::1"])
def test_loopback_needs_no_ssh_unless_another_user_is_named(name: str) -> None:
    assert Host(name).is_loopback
    assert not Host(name, user="ada").is_loopback


def test_any_other_name_needs_ssh() -> None:
    assert not Host("node1").is_loopback


# -- what is refused ----------------------------------------------------------------------------

MISTAKES = {
    "slots=4": ("'slots=4' stands where the host's name belongs", "node1 slots=4"),
    ":4": ("the host's name is empty", "node1:4"),
    "@node1": ("there is no user before the @", "ada@node1"),
    "a@b@node1": ("there is more than one @", "ada@node1"),
    "-o@node1": ("the user '-o' may only have letters, digits", "ada@node1"),
    "no/de": ("the name 'no/de' has '/'; allowed are letters", "node1.example.org"),
    "-oProxyCommand": ("a part of the name '-oProxyCommand' is empty or", "node-1.example.org"),
    "node..org": ("a part of the name 'node..org' is empty", "node-1.example.org"),
    "n" * 64: ("a part of the name is longer than 63", "node1.example.org"),
    "10.0.0.300": ("'10.0.0.300' is made of digits but is no IPv4", "10.0.0.1:4"),
    "node[01-03]": ("ranges in brackets are expanded only in Slurm's own", "node01 slots=4"),
    "node1, node2": ("a file names one host a line, without commas", "node1 slots=4"),
    "[fe80::1": ("the bracket [ is not closed", "[fe80::1]:4"),
    "[node1]": ("'node1' in brackets is no IPv6 address", "[fe80::1]:4"),
    "[fe80::1%;]": ("'fe80::1%;' in brackets is no IPv6 address", "[fe80::1]:4"),
    "[fe80::1]4": ("'4' follows the bracket; only :slots may", "[fe80::1]:4"),
    "fe80::1": ("an IPv6 address stands in brackets", "[fe80::1]"),
    "node1:2:3": ("an IPv6 address stands in brackets", "[fe80::1]:4"),
    "node1:": ("the number of slots is missing", "node1:4"),
    "node1:four": ("slots must be a whole number, not 'four'", "node1:4"),
    "node1:0": ("a host with 0 slots takes no part", "node1:4"),
    "node1:22": (":22 looks like a port", "node1 slots=22"),
    "[::1]:29500": (":29500 looks like a port", "[::1]:4"),
    "node1 slots=": ("the number of slots is missing", "node1 slots=4"),
    "node1 slots=-2": ("slots must be a whole number, not '-2'", "node1 slots=4"),
    "node1 slots=2.5": ("slots must be a whole number, not '2.5'", "node1 slots=4"),
    "node1 slots=" + "9" * 5000: ("slots must be a whole number, not '99", "node1 slots=4"),
    "node1 slots=0": ("a host with 0 slots takes no part", "node1 slots=4"),
    "node1 slots=1025": ("slots=1025 is more than 1024", "node1 slots=4"),
    "node1 slots=2 slots=3": ("slots= is given twice", "node1 slots=3"),
    "node1:2 slots=3": ("slots are given twice, as :2 and as slots=3", "node1 slots=3"),
    "node1 slot=2": ("the key 'slot' is unknown; known are slots and gpus", "node1 slots=2"),
    "node1 gpu=0": ("the key 'gpu' is unknown", "node1 gpus=0"),
    "node1 port=": ("the key 'port' is unknown", "node1 slots=4"),
    "node1 4": ("'4' follows the host; only slots=N and gpus=I,J may", "node1 slots=4"),
    "node1 gpus=": ("the list of GPUs is empty", "node1 gpus=0,1"),
    "node1 gpus=a": ("gpus must be numbers from 0 with commas between", "node1 gpus=0,1"),
    "node1 gpus=0,,1": ("gpus must be numbers from 0 with commas between", "node1 gpus=0,1"),
    "node1 gpus=1,01": ("gpus=1,01 names a GPU twice", "node1 gpus=0,1"),
    "node1 slots=3 gpus=0,1": (
        "slots=3 disagrees with gpus=0,1, which names 2",
        "node1 gpus=0,1",
    ),
}


@pytest.mark.parametrize("line", MISTAKES)
def test_each_mistake_is_told_with_place_line_rule_and_example(line: str) -> None:
    rule, example = MISTAKES[line]
    with pytest.raises(HostError) as caught:
        parse_host_file(f"# hosts\n{line}\n", "hosts.txt")
    text = str(caught.value)
    assert text.startswith(f"hosts.txt: 1 mistake; nothing was started\nhosts.txt:2: {line!r}\n")
    assert rule in text
    assert text.endswith(f"Example: {example}")


@pytest.mark.parametrize("example", sorted({example for _, example in MISTAKES.values()}))
def test_every_corrected_example_is_correct(example: str) -> None:
    assert len(parse_host_file(example, "hosts.txt")) == 1


def test_a_file_of_twelve_mistakes_lists_all_twelve_and_only_them() -> None:
    lines = [
        "node1 slots=zero",
        "node2 slots=0",
        "good slots=2",
        "node3:22",
        "node4 slot=2",
        "node5 4",
        "node6 gpus=0,0",
        "node7 slots=3 gpus=0,1",
        "slots=4",
        "no!de",
        "[fe80::1",
        "GOOD",
        "@node8",
    ]
    with pytest.raises(HostError) as caught:
        parse_host_file("\n".join(lines), "hosts.txt")
    text = str(caught.value)
    assert text.startswith("hosts.txt: 12 mistakes; nothing was started\n")
    for number, line in enumerate(lines, start=1):
        assert (f"hosts.txt:{number}: {line!r}\n" in text) == (number != 3)
    rules = [line for line in text.splitlines() if line.startswith("    ")]
    assert len(set(rules)) == 12
    assert caught.value.exit_code == ExitCode.USAGE == 2


def test_all_mistakes_of_one_line_are_told() -> None:
    with pytest.raises(HostError, match=r"hosts\.txt: 4 mistakes") as caught:
        parse_host_file("@no!de slots=x gpus=", "hosts.txt")
    assert str(caught.value).count("hosts.txt:1:") == 4


def test_a_host_named_twice_is_refused_with_both_places() -> None:
    with pytest.raises(HostError, match="1 mistake") as caught:
        parse_host_file("node1:1\n\nada@Node1 slots=2", "hosts.txt")
    assert "hosts.txt:3: 'ada@Node1 slots=2'" in str(caught.value)
    assert "was named before at hosts.txt:1. Name it once" in str(caught.value)


@pytest.mark.parametrize("text", ["", "\n\n", "# nobody\n", "\ufeff"])
def test_a_file_without_hosts_is_refused(text: str) -> None:
    with pytest.raises(HostError, match=r"hosts\.txt: no host is named"):
        parse_host_file(text, "hosts.txt")


def test_a_missing_file_is_an_error_and_never_means_local(tmp_path: Path) -> None:
    path = tmp_path / "hosts.txt"
    with pytest.raises(HostError, match="No such file or directory; nothing") as caught:
        read_host_file(path)
    assert str(path) in str(caught.value)


def test_a_binary_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "hosts.txt"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(HostError, match="not a text file"):
        read_host_file(path)


def test_mistakes_of_a_list_name_the_entry() -> None:
    with pytest.raises(HostError) as caught:
        parse_host_list("node1,,node2:x")
    text = str(caught.value)
    assert text.startswith("--hosts: 2 mistakes")
    assert "--hosts, entry 2: ''\n    the host's name is empty" in text
    assert "--hosts, entry 3: 'node2:x'\n    slots must be a whole number" in text


def test_a_list_takes_no_keys() -> None:
    with pytest.raises(HostError, match=r"'slots=4' follows the host.*Example: node1:4"):
        parse_host_list("node1 slots=4")


def test_an_empty_list_is_refused() -> None:
    with pytest.raises(HostError, match="--hosts: no host is named"):
        parse_host_list("  ")


# -- devices ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "gpus_found", "expected"),
    [
        (Host("n"), None, ("cpu",)),
        (Host("n", slots=3), None, ("cpu", "cpu", "cpu")),
        (Host("n", gpus=(4, 5)), None, ("cpu", "cpu")),
        (Host("n"), 2, ("cuda:0", "cuda:1")),
        (Host("n", slots=1), 2, ("cuda:0",)),
        (Host("n", gpus=(3, 1)), 4, ("cuda:3", "cuda:1")),
    ],
)
def test_each_slot_gets_its_device(
    host: Host, gpus_found: int | None, expected: tuple[str, ...]
) -> None:
    assert devices_of(host, gpus_found) == expected
    assert slots_of(host, gpus_found) == len(expected)


@pytest.mark.parametrize(
    ("host", "gpus_found", "message"),
    [
        (Host("n"), 0, r"n: 0 GPUs visible there. A CUDA run needs at least one"),
        (Host("n", slots=2), 1, r"n: 1 GPU visible there, but 2 slots .* write slots=1"),
        (Host("n", gpus=(0, 2, 7)), 2, r"n: 2 GPUs visible there, so there is no GPU 2, 7\."),
    ],
)
def test_slots_beyond_the_gpus_found_are_refused(host: Host, gpus_found: int, message: str) -> None:
    with pytest.raises(HostError, match=message):
        devices_of(host, gpus_found)


# -- Slurm --------------------------------------------------------------------------------------


def names(nodelist: str) -> list[str]:
    return [host.name for host in slurm_hosts(nodelist, None)]


def test_ranges_are_expanded_with_their_leading_zeros() -> None:
    assert names("node[01-03,07]-ib,other") == [
        "node01-ib",
        "node02-ib",
        "node03-ib",
        "node07-ib",
        "other",
    ]
    assert names("n[9-11]") == ["n9", "n10", "n11"]
    assert names("n[099-101]") == ["n099", "n100", "n101"]


def test_the_last_bracket_counts_fastest() -> None:
    assert names("r[1-2]n[1-2]") == ["r1n1", "r1n2", "r2n1", "r2n2"]


def test_slurm_a_list_and_a_file_give_the_same_hosts() -> None:
    expected = parse_host_list("n1:2,n2:2,n3:1")
    assert slurm_hosts("n[1-3]", "2(x2),1") == expected
    assert parse_host_file("n1 slots=2\nn2:2\nn3 slots = 1", "f") == expected


def test_one_number_of_slots_holds_for_all_nodes() -> None:
    assert [host.slots for host in slurm_hosts("n[1-3]", "4")] == [4, 4, 4]
    assert [host.slots for host in slurm_hosts("n[1-3]", None)] == [None, None, None]


@pytest.mark.parametrize(
    ("nodelist", "slots", "message"),
    [
        ("", None, "Slurm's node list is empty: run inside an allocation"),
        ("n[1-2", None, "the brackets of 'n.1-2' do not match"),
        ("n1-2]", None, "the brackets of 'n1-2]' do not match"),
        ("n[1-[2]]", None, "the brackets of 'n.1-.2..' do not match"),
        ("n[a-b]", None, "'a-b' is not a number or a range such as 01-16"),
        ("n[]", None, "'' is not a number"),
        ("n[1,,2]", None, "'' is not a number"),
        ("n[3-1]", None, "the range 3-1 runs backwards"),
        ("n[1-999999999]", None, "more than 65536 hosts"),
        ("r[1-60000]n[1-60000]", None, "more than 65536 hosts"),
        ("n1,n1", None, "'n1' was named before"),
        ("n!1", None, "the name 'n!1' has '!'"),
        ("n[1-3]", "2(x2)", "are for 2 nodes, but its list has 3"),
        ("n1", "two", "'two' is not a number from 1"),
        ("n1", "0", "'0' is not a number from 1"),
    ],
)
def test_what_slurm_would_not_say_is_refused(
    nodelist: str, slots: str | None, message: str
) -> None:
    with pytest.raises(HostError, match=message):
        slurm_hosts(nodelist, slots)
