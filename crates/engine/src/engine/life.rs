//! The life of a request as spans, for profiles: waiting, prompt, answer.

use crate::request::RequestId;
use warpsmith::profile::{self, Kind};

/// When a request came to its states. It is told when the request has ended.
pub(super) struct Life {
    id: u64,
    added: u64,
    started: Option<u64>,
    first_token: Option<u64>,
}

impl Life {
    /// Of a request that comes now, if a profile is recorded.
    pub fn begin(id: RequestId) -> Option<Life> {
        profile::is_on().then(|| Life { id: id.0, added: profile::now(), started: None, first_token: None })
    }

    /// Its prompt begins to be computed. It may lose its pages and begin again: the first time counts.
    pub fn start(&mut self) {
        self.started.get_or_insert_with(profile::now);
    }

    /// It has a token.
    pub fn token(&mut self) {
        self.first_token.get_or_insert_with(profile::now);
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        let end = profile::now();
        let Life { id, added, started, first_token } = *self;
        let tell = |name: String, start: u64, end: u64| profile::emit(Kind::Request, name, id, start, end);
        tell(format!("request {id}"), added, end);
        tell("queue".into(), added, started.unwrap_or(end));
        if let Some(started) = started {
            tell("prompt".into(), started, first_token.unwrap_or(end));
        }
        if let Some(first_token) = first_token {
            tell("answer".into(), first_token, end);
        }
    }
}
