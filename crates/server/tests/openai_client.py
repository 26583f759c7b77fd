"""The OpenAI client and LangChain, unmodified, against a server of ours.

Starts `warpsmith serve` with a small model of random weights, or with the model named on the command line, and asks for
everything that clients ask for. What a random model says is noise, so answers are judged by their form alone.

usage: openai_client.py WARPSMITH [MODEL] [--required]

Without the clients nothing is checked, which is a failure with `--required`.
"""

import array
import json
import os
import pathlib
import random
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from importlib.metadata import version

try:
    import openai
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings
    from openai import OpenAI
except ImportError as error:
    print(f"skipped: the Python package {error.name} is not installed here", file=sys.stderr)
    sys.exit("--required" in sys.argv)

KEY = "a-key"
SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["colour", "even"],
    "properties": {"colour": {"enum": ["red", "green"]}, "even": {"type": "boolean"}},
}
TOOL = {
    "type": "function",
    "function": {"name": "lamp", "description": "Switches a lamp.", "parameters": SCHEMA},
}
USER = [{"role": "user", "content": "Say hello."}]


def write_model(folder: pathlib.Path) -> None:
    """A Llama of two small layers, with the tokenizer of the engine's tests."""
    hidden, vocab, layers = 64, 593, 2
    tokenizer = pathlib.Path(__file__).parents[2] / "engine/tests/fixtures/tokenizer"
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(tokenizer / name, folder / name)
    config = {
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens": (vocab, hidden), "lm_head": (vocab, hidden), "model.norm": (hidden,)}
    for layer in range(layers):
        parts = {f"self_attn.{part}_proj": (hidden, hidden) for part in "qkvo"}
        parts |= {f"mlp.{part}_proj": (hidden, hidden) for part in ("gate", "up", "down")}
        parts |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
        shapes |= {f"model.layers.{layer}.{part}": shape for part, shape in parts.items()}
    draw = random.Random(1)
    header, data = {}, bytearray()
    for name, shape in shapes.items():
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        numbers = [1.0] * count if len(shape) == 1 else [draw.gauss(0, 0.1) for _ in range(count)]
        begin = len(data)
        data += array.array("f", numbers).tobytes()
        header[f"{name}.weight"] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, len(data)]}
    head = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + data)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until_ready(url: str, server: "subprocess.Popen[bytes]") -> None:
    for _ in range(1200):
        if server.poll() is not None:
            sys.exit(f"the server ended with {server.returncode}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.1)
    sys.exit("the server did not become ready")


def check_chat(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=USER, max_tokens=8, temperature=0)
    assert answer.object == "chat.completion" and answer.choices[0].message.role == "assistant"
    assert answer.usage is not None and answer.usage.completion_tokens <= 8
    again = client.chat.completions.create(model=model, messages=USER, max_completion_tokens=8, temperature=0)
    assert again.choices[0].message.content == answer.choices[0].message.content
    assert again.usage is not None and again.usage.prompt_tokens_details is not None

    text, finish, usage = "", None, None
    stream = client.chat.completions.create(
        model=model, messages=USER, max_tokens=8, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    assert text == answer.choices[0].message.content, (text, answer)
    assert finish == answer.choices[0].finish_reason and usage is not None
    assert usage.completion_tokens == answer.usage.completion_tokens

    # The client's own accumulator is strict about indices and orders.
    with client.chat.completions.stream(model=model, messages=USER, max_tokens=8, n=3, seed=1) as events:
        for _ in events:
            pass
        # It refuses to return answers that were cut at their length; what it has collected it does return.
        final = events.current_completion_snapshot
    assert [choice.index for choice in final.choices] == [0, 1, 2]


def check_options(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=USER, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content
    for token in logprobs.content:
        assert len(token.top_logprobs) == 3 and token.logprob <= 0 and token.bytes is not None
    seeds = [
        client.chat.completions.create(model=model, messages=USER, max_tokens=8, seed=seed).choices[0].message.content
        for seed in (1, 1, 2)
    ]
    assert seeds[0] == seeds[1]
    several = client.chat.completions.create(model=model, messages=USER, max_tokens=4, n=3)
    assert len(several.choices) == 3
    text = client.completions.create(model=model, prompt="one two three", max_tokens=6, temperature=0, logprobs=2)
    assert text.choices[0].logprobs is not None and len(text.choices[0].logprobs.tokens or []) > 0
    whole = text.choices[0].text
    if len(whole) > 2:
        stopped = client.completions.create(
            model=model, prompt="one two three", max_tokens=6, temperature=0, stop=whole[1:3]
        )
        assert stopped.choices[0].text == whole[: whole.find(whole[1:3])]
        assert stopped.choices[0].finish_reason == "stop"
    two = client.completions.create(model=model, prompt=["a", "b"], max_tokens=2, n=2)
    assert [choice.index for choice in two.choices] == [0, 1, 2, 3]


def check_structure(client: OpenAI, model: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    answer = client.chat.completions.create(model=model, messages=USER, max_tokens=200, response_format=form, seed=1)
    thing = json.loads(answer.choices[0].message.content or "")
    assert thing["colour"] in ("red", "green") and isinstance(thing["even"], bool)

    arguments = {"model": model, "messages": USER, "tools": [TOOL], "tool_choice": "required", "max_tokens": 200}
    answer = client.chat.completions.create(**arguments, parallel_tool_calls=False)
    (call,) = answer.choices[0].message.tool_calls or []
    assert answer.choices[0].finish_reason == "tool_calls" and call.function.name == "lamp"
    assert isinstance(json.loads(call.function.arguments)["even"], bool)
    with client.chat.completions.stream(**arguments, parallel_tool_calls=False) as events:
        for _ in events:
            pass
        (call,) = events.get_final_completion().choices[0].message.tool_calls or []
    assert isinstance(json.loads(call.function.arguments)["even"], bool)
    messages = [
        *USER,
        {"role": "assistant", "tool_calls": [call.model_dump(include={"id", "type", "function"})]},
        {"role": "tool", "tool_call_id": call.id, "content": "done"},
    ]
    client.chat.completions.create(model=model, messages=messages, tools=[TOOL], max_tokens=4)


def check_responses(client: OpenAI, model: str) -> None:
    answer = client.responses.create(model=model, input="Say hello.", max_output_tokens=8, temperature=0)
    assert answer.usage is not None and answer.usage.output_tokens <= 8
    with client.responses.stream(model=model, input="Say hello.", max_output_tokens=8, temperature=0) as events:
        kinds = [event.type for event in events]
    assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete"), kinds
    form = {"format": {"type": "json_schema", "name": "thing", "schema": SCHEMA}}
    answer = client.responses.create(model=model, input="x", max_output_tokens=200, text=form)
    assert json.loads(answer.output_text)["colour"] in ("red", "green")


def check_errors(client: OpenAI, url: str, model: str) -> None:
    try:
        client.chat.completions.create(model=model, messages=USER, temperature=9)
        raise AssertionError("a temperature of 9 was taken")
    except openai.BadRequestError as error:
        assert error.param == "temperature", error
    try:
        client.chat.completions.create(model="nobody", messages=USER)
        raise AssertionError("a model that there is not was taken")
    except openai.NotFoundError as error:
        assert error.code == "model_not_found", error
    try:
        OpenAI(base_url=f"{url}/v1", api_key="wrong").models.list()
        raise AssertionError("a wrong key was taken")
    except openai.AuthenticationError as error:
        assert error.code == "invalid_api_key", error


def check_langchain(url: str, model: str) -> None:
    address = {"model": model, "base_url": f"{url}/v1", "api_key": KEY}
    chat = ChatOpenAI(**address, max_tokens=8, temperature=0, stream_usage=True)
    answer = chat.invoke("Say hello.")
    assert answer.usage_metadata is not None and 0 < answer.usage_metadata["output_tokens"] <= 8, answer
    first, *others = chat.stream("Say hello.")
    whole = first
    for part in others:
        whole = whole + part
    assert whole.content == answer.content and whole.usage_metadata is not None, whole
    assert whole.usage_metadata["output_tokens"] == answer.usage_metadata["output_tokens"]
    assert len(chat.batch(["a", "b", "c"])) == 3

    # It wants to know what a schema is called.
    schema = {"title": "thing", "description": "A thing.", **SCHEMA}
    patient = ChatOpenAI(**address, max_tokens=200, seed=1)
    answer = patient.bind_tools([TOOL], tool_choice="required", parallel_tool_calls=False).invoke("x")
    (call,) = answer.tool_calls
    assert call["name"] == "lamp" and isinstance(call["args"]["even"], bool), answer
    for method in ("json_schema", "function_calling"):
        thing = patient.with_structured_output(schema, method=method).invoke("x")
        assert thing["colour"] in ("red", "green") and isinstance(thing["even"], bool), (method, thing)

    responses = ChatOpenAI(**address, max_tokens=200, use_responses_api=True)
    thing = responses.with_structured_output(schema, method="json_schema").invoke("x")
    assert thing["colour"] in ("red", "green"), thing
    parts = list(responses.stream("Say hello.", max_tokens=8))
    assert len(parts) > 1 and parts[-1].usage_metadata is not None, parts

    # Texts as they are: its own tokens are those of OpenAI's models.
    vectors = OpenAIEmbeddings(**address, check_embedding_ctx_length=False).embed_documents(["a", "b c", "a"])
    assert len(vectors) == 3 and vectors[0] == vectors[2] != vectors[1]
    assert abs(sum(x * x for x in vectors[0]) - 1) < 1e-3


def check_all(program: str, path: str) -> None:
    url = f"http://127.0.0.1:{(port := free_port())}"
    words = [program, "serve", path, "--port", str(port), "--api-key", KEY, "--served-model-name", "m"]
    environment = {**os.environ, "OPENAI_API_KEY": KEY}
    server = subprocess.Popen([*words, "--device", "cpu"], env=environment)
    try:
        wait_until_ready(url, server)
        client = OpenAI(base_url=f"{url}/v1", api_key=KEY, timeout=120)
        assert [model.id for model in client.models.list()] == ["m"]
        check_chat(client, "m")
        check_options(client, "m")
        check_structure(client, "m")
        check_responses(client, "m")
        check_errors(client, url, "m")
        check_langchain(url, "m")
    finally:
        server.terminate()
        status = server.wait(timeout=60)
    assert status == 0, status
    print(f"openai {openai.__version__}, langchain-openai {version('langchain-openai')}: all checks passed")


def main() -> None:
    program, *models = [word for word in sys.argv[1:] if word != "--required"]
    if models:
        check_all(program, models[0])
        return
    with tempfile.TemporaryDirectory() as folder:
        write_model(pathlib.Path(folder))
        check_all(program, folder)


main()
