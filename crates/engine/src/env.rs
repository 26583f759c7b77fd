//! The environment variables that the engine and its commands read, besides those of the library.

/// The model of commands that are given none: a path, or a name on the hub.
pub const MODEL: &str = "WARPSMITH_MODEL";

/// Variables of the Hugging Face hub, with the meaning they have for its own programs.
pub mod hub {
    /// Folder whose `hub` holds downloaded models and whose `token` the token, `~/.cache/huggingface` where unset.
    pub const HOME: &str = "HF_HOME";
    /// Folder of downloaded models, instead of `hub` in the one above.
    pub const CACHE: &str = "HF_HUB_CACHE";
    /// The token that is sent to the hub, preferred over that of the file. White space around it does not count.
    pub const TOKEN: &str = "HF_TOKEN";
    /// Address of the hub, `https://huggingface.co` where unset.
    pub const ENDPOINT: &str = "HF_ENDPOINT";
    /// `1`, `ON`, `YES` or `TRUE`, in any case: only what was downloaded before is used.
    pub const OFFLINE: &str = "HF_HUB_OFFLINE";
}
