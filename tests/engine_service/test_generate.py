"""Generate over a real server: what the stream carries and how it ends."""

from __future__ import annotations

import asyncio

import pytest

from tandem.errors import TandemError
from tandem.inference.v1 import inference_pb2 as pb
from tests.engine_service.fakes import EOS, FakeRunner, FakeSpeculation, scripted
from tests.engine_service.server import ask, serve

SAY = "The quick brown fox — naïve 🦊 — jumps over END of it."


def says(text: str, prompt: str = "hello") -> FakeRunner:
    return FakeRunner(next_token=scripted(text, prompt_len=len(prompt)), max_model_len=200)


async def test_stream_in_order_with_text_and_usage() -> None:
    async with serve(says(SAY)) as server:
        request = ask(stop=pb.StopConditions(max_tokens=150), output=pb.OutputOptions(receipt=True), request_id="a")
        answer = (await server.generate(request)).check()
        assert answer.text() == SAY
        assert answer.ids() == [*SAY.encode(), EOS]
        assert answer.finished().reason == pb.FINISH_REASON_STOP and answer.finished().stop_token_id == EOS
        usage = answer.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (5, len(SAY.encode()) + 1)
        assert usage.receipt.seed == answer.accepted.seed and usage.receipt.steps == usage.completion_tokens
        assert answer.accepted.epoch == server.engine.epoch and answer.accepted.model == "fake"
        await server.idle()


async def test_no_delta_ever_ends_within_a_character() -> None:
    async with serve(says("🦊é🦊")) as server:
        answer = (await server.generate(ask(stop=pb.StopConditions(max_tokens=50)))).check()
        assert answer.text() == "🦊é🦊"
        assert "\ufffd" not in answer.text()
        # Cut off by max_tokens inside the second fox: its bytes show as one replacement character.
        cut = (await server.generate(ask(stop=pb.StopConditions(max_tokens=8)))).check()
        assert cut.text() == "🦊é\ufffd" and cut.finished().reason == pb.FINISH_REASON_LENGTH


@pytest.mark.parametrize("include", [False, True])
async def test_stop_string_across_tokens(include: bool) -> None:
    async with serve(says(SAY)) as server:
        stop = pb.StopConditions(
            max_tokens=150, stop=["zzz", "jumps over END", "END of"], include_stop_str_in_output=include
        )
        answer = (await server.generate(ask(stop=stop))).check()
        end = SAY.index("jumps") + (len("jumps over END") if include else 0)
        assert answer.text() == SAY[:end]
        assert answer.finished().stop_string == "jumps over END"
        assert answer.usage.completion_tokens == len(SAY[: SAY.index("END") + 3].encode())
        if not include:
            assert all("jumps" not in delta.text for delta in answer.deltas())


async def test_what_only_looked_like_a_stop_string_comes_later() -> None:
    async with serve(says("abcabdabc")) as server:
        answer = (await server.generate(ask(stop=pb.StopConditions(max_tokens=50, stop=["abcabc"])))).check()
        assert answer.text() == "abcabdabc"
        assert answer.finished().WhichOneof("matched") == "stop_token_id"


async def test_min_tokens_postpones_stop_strings() -> None:
    async with serve(says("xx.yy.zz.")) as server:
        stop = pb.StopConditions(max_tokens=50, stop=["."], min_tokens=4)
        assert (await server.generate(ask(stop=stop))).check().text() == "xx.yy"


@pytest.mark.parametrize("include", [False, True])
async def test_stop_token_id(include: bool) -> None:
    async with serve(says("abc!def")) as server:
        stop = pb.StopConditions(max_tokens=50, stop_token_ids=[ord("!")], include_stop_str_in_output=include)
        answer = (await server.generate(ask(stop=stop))).check()
        assert answer.text() == ("abc!" if include else "abc")
        assert answer.finished().stop_token_id == ord("!")
        assert answer.ids() == [*b"abc!"]


async def test_ignore_eos_goes_on_to_max_tokens() -> None:
    async with serve(says("ab")) as server:
        answer = (await server.generate(ask(stop=pb.StopConditions(max_tokens=6, ignore_eos=True)))).check()
        assert answer.ids() == [*b"ab", EOS, EOS, EOS, EOS]
        assert answer.text() == "ab" and answer.finished().reason == pb.FINISH_REASON_LENGTH
        kept = pb.OutputOptions(keep_special_tokens=True)
        answer = (
            await server.generate(ask(stop=pb.StopConditions(max_tokens=3, ignore_eos=True), output=kept))
        ).check()
        assert answer.text() == "ab<eos>"


async def test_logprobs_and_prompt_logprobs() -> None:
    async with serve(says("abc")) as server:
        output = pb.OutputOptions(logprobs=2, prompt_logprobs=1)
        for _ in range(2):  # the second time the prompt is cached, and scored all the same
            answer = (await server.generate(ask("hello, what a day", output=output))).check()
            prompt = next(e.prompt for e in answer.events if e.HasField("prompt"))
            assert answer.kinds.index("prompt") < answer.kinds.index("delta")
            assert [score.id for score in prompt.tokens] == [*b"hello, what a day"]
            assert not prompt.tokens[0].HasField("logprob") and prompt.tokens[1].HasField("logprob")
            scores = [score for delta in answer.deltas() for score in delta.logprobs]
            assert [score.id for score in scores] == answer.ids()
            assert all(len(score.top_ids) == 2 == len(score.top_logprobs) for score in scores)
            assert answer.usage.cached_tokens == 0


async def test_final_only_is_one_delta_per_choice() -> None:
    async with serve(says(SAY)) as server:
        request = ask(n=2, stop=pb.StopConditions(max_tokens=150), output=pb.OutputOptions(final_only=True, logprobs=0))
        answer = (await server.generate(request)).check()
        for choice in (0, 1):
            (delta,) = answer.deltas(choice)
            assert delta.text == SAY and len(delta.logprobs) == len(delta.ids)


async def test_choices_differ_by_noise_and_share_the_prompt() -> None:
    async with serve() as server:
        request = ask("a rather long prompt", n=4, sampling=pb.SamplingParams(temperature=1.0, seed=7))
        answer = (await server.generate(request)).check()
        outputs = [tuple(answer.ids(choice)) for choice in range(4)]
        assert len(set(outputs)) == 4
        alone = await server.generate(ask("a rather long prompt", sampling=pb.SamplingParams(temperature=1.0, seed=7)))
        assert tuple(alone.ids()) == outputs[0]
        assert answer.usage.completion_tokens == sum(map(len, outputs))
        assert answer.accepted.seed == 7
        await server.idle()


async def test_second_request_reads_the_cache() -> None:
    async with serve() as server:
        first = await server.generate(ask("the same sixteen", output=pb.OutputOptions(receipt=True)))
        second = (await server.generate(ask("the same sixteen", output=pb.OutputOptions(receipt=True)))).check()
        assert first.ids() == second.ids()
        assert first.usage.cached_tokens == 0 and second.usage.cached_tokens == 15
        assert second.accepted.cached_tokens == 15
        assert second.usage.receipt.cached_blocks == 4
        salted = await server.generate(ask("the same sixteen", cache_salt="other"))
        assert salted.usage.cached_tokens == 0 and salted.ids() == first.ids()


async def test_speculation_changes_steps_and_nothing_else() -> None:
    plain, runner = FakeRunner(), FakeRunner()
    speculation = FakeSpeculation(runner.next_token, runner.spec.vocab_size)
    request = ask("hi", stop=pb.StopConditions(max_tokens=60, ignore_eos=True), output=pb.OutputOptions(receipt=True))
    async with serve(plain) as server:
        wanted = await server.generate(request)
    async with serve(runner, speculation) as server:
        answer = (await server.generate(request)).check()
        assert answer.ids() == wanted.ids() and answer.text() == wanted.text()
        receipt = answer.usage.receipt
        assert 0 < receipt.drafts_accepted <= receipt.drafts_proposed
        assert receipt.steps < 60 and receipt.accepted_by_proposer == {"fake": receipt.drafts_accepted}
        assert receipt.proposed_by_proposer == {"fake": receipt.drafts_proposed}
        assert sum(receipt.accepted_by_position) == receipt.drafts_accepted > receipt.verifications > 0
        assert sum(delta.drafted.bit_count() for delta in answer.deltas()) == receipt.drafts_accepted
        await server.idle()
        assert not speculation.live


async def test_stop_inside_accepted_drafts_cuts_everything_after() -> None:
    runner = says("abcdefgh.ijklmnop")
    speculation = FakeSpeculation(lambda *args: runner.next_token(*args), runner.spec.vocab_size, most=20)
    async with serve(runner, speculation) as server:
        answer = (await server.generate(ask(stop=pb.StopConditions(max_tokens=60, stop=["gh."])))).check()
        assert answer.text() == "abcdef" and answer.ids() == [*b"abcdefgh."]
        assert answer.usage.completion_tokens == 9


async def test_max_tokens_zero_only_computes_the_prompt() -> None:
    async with serve() as server:
        output = pb.OutputOptions(prompt_logprobs=0)
        answer = (await server.generate(ask("prompt", stop=pb.StopConditions(max_tokens=0), output=output))).check()
        assert answer.ids() == [] and answer.finished().reason == pb.FINISH_REASON_LENGTH
        assert "prompt" in answer.kinds and answer.usage.completion_tokens == 0


async def test_truncation_keeps_the_end_of_the_prompt() -> None:
    async with serve() as server:
        long = await server.generate(ask("xxxxxtail", truncate_prompt_tokens=4))
        short = await server.generate(ask("tail"))
        assert long.ids() == short.ids() and long.accepted.prompt_tokens == 4


async def test_without_seed_one_is_drawn_and_reported() -> None:
    async with serve() as server:
        sampling = pb.SamplingParams(temperature=1.0)
        first = await server.generate(ask(sampling=sampling))
        second = await server.generate(ask(sampling=sampling))
        assert first.accepted.seed != second.accepted.seed
        again = await server.generate(ask(sampling=pb.SamplingParams(temperature=1.0, seed=first.accepted.seed)))
        assert again.ids() == first.ids()


async def test_many_at_once_get_what_they_get_alone() -> None:
    texts = [f"prompt number {index}" for index in range(30)]
    async with serve(FakeRunner(num_blocks=24), max_num_seqs=6) as server:
        alone = [(await server.generate(ask(text))).ids() for text in texts[:10]]
        together = await asyncio.gather(*(server.generate(ask(text)) for text in texts))
        assert [answer.ids() for answer in together[:10]] == alone
        assert server.runner.max_seqs_seen <= 6 and server.runner.max_tokens_seen <= 64
        await server.idle()


async def test_tokenizer_digest_and_model_are_checked() -> None:
    async with serve() as server:
        with pytest.raises(TandemError) as caught:
            await server.generate(ask(tokenizer_digest="other"))
        assert caught.value.reason == "TOKENIZER_MISMATCH"
        with pytest.raises(TandemError) as caught:
            await server.generate(ask(model="gpt-9"))
        assert caught.value.reason == "MODEL_NOT_FOUND" and caught.value.metadata["served"] == "fake, alias"
        digest = server.engine.tokenizer.bundle.digest
        assert (await server.generate(ask(model="alias", tokenizer_digest=digest))).ids()
