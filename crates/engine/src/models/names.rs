//! The names that weights have in each format.

/// A format of weights, as far as names are concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Naming {
    /// As transformers saves a model.
    Transformers,
    /// As in a GGUF file.
    Gguf,
}

/// A part of a model that has a weight, and maybe a bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Part {
    Embedding,
    Positions,
    FinalNorm,
    Head,
    AttentionNorm,
    Query,
    Key,
    Value,
    QueryKeyValue,
    QueryNorm,
    KeyNorm,
    AttentionOut,
    AttentionOutNorm,
    MlpNorm,
    Gate,
    Up,
    GateUp,
    Down,
    MlpOutNorm,
    Router,
}

impl Part {
    /// The names in GGUF, in transformers' Llama and its relatives, and in transformers' GPT-2, without `.weight` and
    /// `.bias`. `{}` is the number of the layer. `-` where a family has no such part.
    pub(super) fn names(self) -> [&'static str; 3] {
        match self {
            Part::Embedding => ["token_embd", "model.embed_tokens", "transformer.wte"],
            Part::Positions => ["position_embd", "-", "transformer.wpe"],
            Part::FinalNorm => ["output_norm", "model.norm", "transformer.ln_f"],
            Part::Head => ["output", "lm_head", "lm_head"],
            Part::AttentionNorm => {
                ["blk.{}.attn_norm", "model.layers.{}.input_layernorm", "transformer.h.{}.ln_1"]
            }
            Part::Query => ["blk.{}.attn_q", "model.layers.{}.self_attn.q_proj", "-"],
            Part::Key => ["blk.{}.attn_k", "model.layers.{}.self_attn.k_proj", "-"],
            Part::Value => ["blk.{}.attn_v", "model.layers.{}.self_attn.v_proj", "-"],
            Part::QueryKeyValue => {
                ["blk.{}.attn_qkv", "model.layers.{}.self_attn.qkv_proj", "transformer.h.{}.attn.c_attn"]
            }
            Part::QueryNorm => ["blk.{}.attn_q_norm", "model.layers.{}.self_attn.q_norm", "-"],
            Part::KeyNorm => ["blk.{}.attn_k_norm", "model.layers.{}.self_attn.k_norm", "-"],
            Part::AttentionOut => {
                ["blk.{}.attn_output", "model.layers.{}.self_attn.o_proj", "transformer.h.{}.attn.c_proj"]
            }
            // What Llama calls so is the norm before the feed-forward layer.
            Part::AttentionOutNorm => {
                ["blk.{}.post_attention_norm", "model.layers.{}.post_attention_layernorm", "-"]
            }
            Part::MlpNorm => {
                ["blk.{}.ffn_norm", "model.layers.{}.post_attention_layernorm", "transformer.h.{}.ln_2"]
            }
            Part::Gate => ["blk.{}.ffn_gate", "model.layers.{}.mlp.gate_proj", "-"],
            Part::GateUp => ["blk.{}.ffn_up", "model.layers.{}.mlp.gate_up_proj", "-"],
            Part::Up => ["blk.{}.ffn_up", "model.layers.{}.mlp.up_proj", "transformer.h.{}.mlp.c_fc"],
            Part::Down => ["blk.{}.ffn_down", "model.layers.{}.mlp.down_proj", "transformer.h.{}.mlp.c_proj"],
            Part::MlpOutNorm => ["blk.{}.post_ffw_norm", "model.layers.{}.post_feedforward_layernorm", "-"],
            Part::Router => ["blk.{}.ffn_gate_inp", "model.layers.{}.mlp.gate", "-"],
        }
    }

    /// Its name in the files of a family, with `{}` for its layer.
    pub(super) fn name_in(self, naming: Naming, architecture: &str) -> &'static str {
        let [gguf, llama, gpt2] = self.names();
        match (naming, architecture, self) {
            (Naming::Gguf, ..) => gguf,
            (_, "gpt2", _) => gpt2,
            (_, "gemma3_text", Part::MlpNorm) => "model.layers.{}.pre_feedforward_layernorm",
            (_, "mixtral", Part::Router) => "model.layers.{}.block_sparse_moe.gate",
            _ => llama,
        }
    }

    /// Whether GPT-2 stores it with inputs before outputs.
    pub(super) fn is_transposed_in_gpt2(self) -> bool {
        matches!(self, Part::QueryKeyValue | Part::AttentionOut | Part::Up | Part::Down)
    }
}
