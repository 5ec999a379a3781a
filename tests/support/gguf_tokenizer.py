"""Helpers for the GGUF tokenizer tests and others."""

from tokenizers import pre_tokenizers

END, START, TOOL = "<|endoftext|>", "<|start|>", "<|tool call|>"


CHAT = [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": f"What is {END}? ñ 漢"}]


def check_same(ours, theirs, texts, ids):
    for special in (True, False):
        encoded = ours(texts, add_special_tokens=special)["input_ids"]
        assert encoded == theirs(texts, add_special_tokens=special, verbose=False)["input_ids"]
    for skip in (True, False):
        options = {"skip_special_tokens": skip, "clean_up_tokenization_spaces": False}
        assert [ours.decode(row, **options) for row in ids] == [theirs.decode(row, **options) for row in ids]
    assert ours.get_vocab() == theirs.get_vocab() and len(ours) == len(theirs)
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.chat_template == theirs.chat_template
    for start in (False, True):
        rendered = [
            one.apply_chat_template(CHAT, add_generation_prompt=start, tokenize=False) for one in (ours, theirs)
        ]
        assert rendered[0] == rendered[1]
        chats = [one.apply_chat_template(CHAT, add_generation_prompt=start)["input_ids"] for one in (ours, theirs)]
        assert chats[0] == chats[1]


def splitting_digits(tokenizer):
    """Add to transformers' tokenizer of a GGUF file the digit splits of a SmolLM's tokenizer.json, which it omits."""
    digits, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    return tokenizer
