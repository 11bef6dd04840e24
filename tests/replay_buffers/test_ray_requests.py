"""How clients of a served buffer request ahead, send later and keep a ratio; without a cluster."""

from __future__ import annotations

import pickle
import threading
import time
from typing import Any

import pytest

pytest.importorskip("torchrl")

from sb3_extra_buffers._torchrl.service_limiter import RateLimiter
from sb3_extra_buffers._torchrl.service_requests import PacketSender, Prefetcher
from sb3_extra_buffers.errors import ArgumentError, RateLimitError

# ---- batches that are requested ahead ----


class Answers:
    """Answers requests with their numbers."""

    def __init__(self) -> None:
        self.requested = 0
        self.failing: set[int] = set()

    def request(self) -> Any:
        number = self.requested
        self.requested += 1

        def result() -> int:
            if number in self.failing:
                raise ValueError(f"request {number}")
            return number

        return result


def wait_until(condition: Any) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.001)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_answers_arrive_in_order_with_a_fixed_number_of_requests_in_flight(depth: int) -> None:
    answers, batches = Answers(), Prefetcher(depth)
    for number in range(10):
        assert batches.next("same", answers.request) == number
        assert answers.requested == number + 1 + depth


def test_answers_that_are_dropped_before_they_are_fetched_are_discarded() -> None:
    discarded, may_fail = [], threading.Event()

    class Answer:
        def __init__(self, number: int) -> None:
            self.number = number

        def __call__(self) -> None:
            may_fail.wait(30)
            raise ValueError(self.number)

        def discard(self) -> None:
            discarded.append(self.number)
            raise ValueError("this does not end the thread")

    batches, numbers = Prefetcher(3), iter(range(100))

    def request() -> Any:
        return Answer(next(numbers))

    def learn() -> None:
        with pytest.raises(ValueError, match="0"):
            batches.next("key", request)

    learner = threading.Thread(target=learn)
    learner.start()
    wait_until(lambda: len(batches._futures) == 3)
    batches.drop()
    may_fail.set()
    learner.join()
    wait_until(lambda: discarded == [1, 2, 3])
    assert batches.next("another", Answers().request) == 0


def test_another_key_drops_what_is_in_flight() -> None:
    answers, batches = Answers(), Prefetcher(2)
    assert batches.next(32, answers.request) == 0
    assert batches.next(64, answers.request) == 3
    assert batches.next(64, answers.request) == 4
    batches.drop()
    assert batches.next(64, answers.request) == 7


def test_an_error_is_raised_by_the_call_that_would_return_the_answer() -> None:
    answers, batches = Answers(), Prefetcher(2)
    answers.failing = {2, 3}
    assert [batches.next("same", answers.request) for _ in range(2)] == [0, 1]
    with pytest.raises(ValueError, match="request 2"):
        batches.next("same", answers.request)
    # what was in flight is dropped, the failed request 3 included
    assert batches.next("same", answers.request) == 5


def test_a_dropped_prefetcher_ends_its_thread() -> None:
    before = threading.active_count()
    batches = Prefetcher(2)
    batches.next("same", Answers().request)
    assert threading.active_count() == before + 1
    del batches
    wait_until(lambda: threading.active_count() == before)


# ---- packets that are acknowledged later ----


class Receiver:
    """Stores packets, if they are not ``bad``."""

    def __init__(self) -> None:
        self.stored: list[Any] = []
        self.calls = 0
        self.open = threading.Event()
        self.open.set()

    def send(self, packets: list[Any], counts: list[int]) -> tuple[int, BaseException | None]:
        assert counts == [10] * len(packets)
        self.calls += 1
        self.open.wait()
        for number, packet in enumerate(packets):
            if packet == "bad":
                return number, ValueError("a bad packet")
            self.stored.append(packet)
        return len(packets), None


def test_packets_are_stored_in_order_and_several_in_one_call() -> None:
    receiver = Receiver()
    sender = PacketSender(receiver.send, 8)
    receiver.open.clear()
    for number in range(8):
        sender.put(number, 10)
    with pytest.raises(TimeoutError, match="80 items are not acknowledged"):
        sender.flush(0.01)
    receiver.open.set()
    for number in range(8, 100):
        sender.put(number, 10)
    sender.flush()
    assert receiver.stored == list(range(100))
    assert receiver.calls < 100


def test_put_waits_while_too_many_packets_are_unacknowledged() -> None:
    receiver = Receiver()
    sender = PacketSender(receiver.send, 2)
    receiver.open.clear()
    passed: list[int] = []

    def fill() -> None:
        for number in range(5):
            sender.put(number, 10)
            passed.append(number)

    thread = threading.Thread(target=fill)
    thread.start()
    wait_until(lambda: len(passed) == 2)
    time.sleep(0.05)
    assert len(passed) == 2
    receiver.open.set()
    thread.join()
    sender.flush()
    assert receiver.stored == [0, 1, 2, 3, 4]


def test_after_an_error_the_packets_behind_it_are_dropped_and_the_error_is_raised_once() -> None:
    receiver = Receiver()
    sender = PacketSender(receiver.send, 8)
    receiver.open.clear()
    for packet in ("one", "two", "bad", "three"):
        sender.put(packet, 10)
    receiver.open.set()
    with pytest.raises(ValueError, match="a bad packet"):
        sender.flush()
    sender.flush()
    sender.put("four", 10)
    sender.flush()
    assert receiver.stored == ["one", "two", "four"]


def test_packets_in_flight_survive_the_sender() -> None:
    receiver = Receiver()
    sender = PacketSender(receiver.send, 8)
    receiver.open.clear()
    sender.put("one", 10)
    sender.put("two", 10)
    del sender
    receiver.open.set()
    wait_until(lambda: receiver.stored == ["one", "two"])


@pytest.mark.parametrize("number", [-1, 1.5, True, None, "2"])
def test_invalid_depths_are_refused(number: Any) -> None:
    with pytest.raises(ArgumentError, match="prefetch"):
        Prefetcher(number)
    with pytest.raises(ArgumentError, match="max_pending"):
        PacketSender(Receiver().send, number)


# ---- the rate limiter ----


def insert(limiter: RateLimiter, count: int) -> None:
    with limiter.inserting(count):
        pass


def draw(limiter: RateLimiter, count: int) -> None:
    with limiter.sampling(count):
        pass


def test_learners_wait_for_the_first_items_and_collectors_for_learners() -> None:
    limiter = RateLimiter(2, min_size=100, tolerance=50, timeout=0)
    insert(limiter, 90)
    with pytest.raises(RateLimitError, match=r"to draw 8 items: 90 items are stored \(min_size=100\)"):
        draw(limiter, 8)
    # 30 items more than min_size: 60 samples, above the tolerance
    insert(limiter, 40)
    with pytest.raises(RateLimitError, match=r"balance is 60 \(samples_per_insert=2, tolerance=50\)"):
        insert(limiter, 10)
    for _ in range(5):
        draw(limiter, 24)
    assert limiter.state() == {"inserts": 130, "samples": 120, "balance": -60}
    with pytest.raises(RateLimitError, match="are any collectors storing items"):
        draw(limiter, 24)
    insert(limiter, 10)
    draw(limiter, 24)


@pytest.mark.parametrize(
    ("packet", "batch", "ratio", "tolerance"), [(64, 256, 8, 0), (1, 1000, 0.5, 1), (500, 3, 4, 10)]
)
def test_collectors_and_learners_never_wait_for_each_other_for_ever(
    packet: int, batch: int, ratio: float, tolerance: float
) -> None:
    limiter = RateLimiter(ratio, min_size=100, tolerance=tolerance, timeout=60)
    n_batches = max(4, int(40 * packet * ratio / batch))
    stop = threading.Event()

    def collect() -> None:
        while not stop.is_set():
            insert(limiter, packet)

    collectors = [threading.Thread(target=collect, daemon=True) for _ in range(2)]
    for thread in collectors:
        thread.start()
    for _ in range(n_batches):
        draw(limiter, batch)
        # the tolerance, and what was admitted before: a packet of each collector or a batch
        assert abs(limiter.state()["balance"]) <= tolerance + max(2 * packet * ratio, batch)
    stop.set()
    # those that wait are let in
    while any(thread.is_alive() for thread in collectors):
        limiter.reset()
        time.sleep(0.001)


def test_what_fails_does_not_count() -> None:
    limiter = RateLimiter(1, min_size=10, tolerance=10, timeout=0)
    insert(limiter, 15)
    before = limiter.state()
    for refused in (limiter.sampling(5), limiter.inserting(7)):
        with pytest.raises(KeyError), refused:
            raise KeyError
        assert limiter.state() == before


def test_a_restarted_limiter_begins_in_balance() -> None:
    limiter = RateLimiter(4, min_size=10, tolerance=8, timeout=0)
    limiter.reset(1000)
    draw(limiter, 8)
    insert(limiter, 1)
    copy = pickle.loads(pickle.dumps(limiter))
    assert repr(copy) == repr(limiter)
    assert copy.state() == {"inserts": 0, "samples": 0, "balance": 0}


@pytest.mark.parametrize("options", [{"samples_per_insert": 0}, {"samples_per_insert": "x"}, {"min_size": 0},
                                     {"tolerance": -1}, {"timeout": float("nan")}])  # fmt: skip
def test_invalid_ratios_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(options))):
        RateLimiter(**{"samples_per_insert": 1} | options)
