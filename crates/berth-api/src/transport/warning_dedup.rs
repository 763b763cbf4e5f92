//! Deduplication of the server's `Warning` headers: logs each text once per hour (spec 10 §2.2). Pure.

use std::{num::NonZeroUsize, time::Duration};

use http::HeaderMap;
use lru::LruCache;

/// Interval after which a text is logged again.
const AGAIN: Duration = Duration::from_secs(3600);
/// Number of remembered texts.
const TEXTS: NonZeroUsize = NonZeroUsize::new(256).expect("not zero");
/// Maximum length of a text, in characters.
const LENGTH: usize = 1024;

/// LRU cache of logged texts.
pub struct WarningDedup(LruCache<String, Duration>);

impl Default for WarningDedup {
    fn default() -> Self {
        Self(LruCache::new(TEXTS))
    }
}

impl WarningDedup {
    /// Warnings to log now; `now` counts from any fixed moment.
    pub fn fresh(&mut self, headers: &HeaderMap, now: Duration) -> Vec<String> {
        let texts = headers.get_all("warning").iter().filter_map(|value| text(value.to_str().ok()?));
        let mut fresh = Vec::new();
        for text in texts {
            let is_known = self.0.get(&text).is_some_and(|logged_at| now.saturating_sub(*logged_at) < AGAIN);
            if !is_known {
                self.0.put(text.clone(), now);
                fresh.push(text);
            }
        }
        fresh
    }
}

/// Extracts the text of `299 - "text"`; other codes are ignored.
fn text(value: &str) -> Option<String> {
    let quoted = value.trim().strip_prefix("299 ")?.split_once(' ')?.1.trim().strip_prefix('"')?;
    let (mut text, mut is_escaped) = (String::new(), false);
    for c in quoted.chars().take(LENGTH) {
        match c {
            '\\' if !is_escaped => is_escaped = true,
            '"' if !is_escaped => break,
            c => {
                text.push(c);
                is_escaped = false;
            }
        }
    }
    Some(text).filter(|text| !text.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_warning_is_logged_once_an_hour() {
        let mut dedup = WarningDedup::default();
        let mut headers = HeaderMap::new();
        for value in
            ["299 - \"unknown field \\\"status.foo\\\"\" \"date\"", "299 - \"b\"", "199 - \"c\"", "299 -", "nonsense"]
        {
            headers.append("warning", value.parse().expect("a value"));
        }
        let mut at = |seconds| dedup.fresh(&headers, Duration::from_secs(seconds));
        assert_eq!(at(0), ["unknown field \"status.foo\"", "b"]);
        assert_eq!(at(3599), [""; 0]);
        assert_eq!(at(3600).len(), 2);
    }

    #[test]
    fn memory_is_bounded() {
        let mut dedup = WarningDedup::default();
        for number in 0..1000 {
            let mut headers = HeaderMap::new();
            headers.insert("warning", format!("299 - \"{number}\"").parse().expect("a value"));
            assert_eq!(dedup.fresh(&headers, Duration::ZERO).len(), 1);
        }
        assert_eq!(dedup.0.len(), 256);
    }
}
