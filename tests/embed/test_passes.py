"""Which inputs share a pass: no pass is too large, nothing is lost, jobs take turns."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outrider.embed.passes import EmbeddingJob, PassQueue
from outrider.pooling import TokenInput

LENGTHS = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=9), min_size=1, max_size=6)


def job_of(*lengths: int) -> EmbeddingJob:
    return EmbeddingJob([TokenInput((0,) * length) for length in lengths])


def queue_of(*jobs: EmbeddingJob, pass_tokens: int = 20) -> PassQueue:
    queue = PassQueue(pass_tokens)
    for job in jobs:
        queue.add(job)
    return queue


@given(LENGTHS, st.integers(1, 40))
def test_every_input_is_in_one_pass_and_no_pass_is_too_large(lengths: list[list[int]], most: int) -> None:
    jobs = [job_of(*each) for each in lengths]
    queue = queue_of(*jobs, pass_tokens=most)
    seen = []
    while chosen := queue.next_pass():
        num_tokens = sum(len(job.inputs[i]) for job, i in chosen)
        assert num_tokens <= most or len(chosen) == 1
        seen += [(jobs.index(job), i) for job, i in chosen]
    assert sorted(seen) == [(n, i) for n, each in enumerate(lengths) for i in range(len(each))]


def test_a_small_job_shares_the_next_pass_with_a_large_one() -> None:
    large, small = job_of(*[10] * 50), job_of(10)
    chosen = queue_of(large, small).next_pass()
    assert [job for job, _ in chosen] == [large, small]


def test_inputs_of_a_job_come_by_length() -> None:
    job = job_of(9, 2, 5, 2)
    assert [i for _, i in queue_of(job).next_pass()] == [1, 3, 2, 0]


def test_abandoned_jobs_are_left_out() -> None:
    one, other = job_of(1, 1), job_of(1)
    queue = queue_of(one, other)
    one.abandon()
    assert [job for job, _ in queue.next_pass()] == [other]
    assert queue.next_pass() == []
    assert not one.has_started
    assert other.has_started
