//! Single-use tokens with expiry for prepared streams. Pure.
//! Implements spec 04b §5.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

/// Lifetime of a token.
pub const LIFE: Duration = Duration::from_secs(60);
/// Maximum number of waiting tokens.
pub const MOST: usize = 1000;

/// The maximum number of tokens is waiting.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TokenLimitReached;

/// Waiting values by token.
#[derive(Debug)]
pub struct Tokens<T>(HashMap<String, (Instant, T)>);

impl<T> Default for Tokens<T> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<T> Tokens<T> {
    /// Stores a value under a token for [`LIFE`].
    ///
    /// # Errors
    /// [`MOST`] tokens are waiting.
    pub fn keep(&mut self, token: String, what: T, now: Instant) -> Result<(), TokenLimitReached> {
        if self.0.len() >= MOST {
            self.0.retain(|_, (since, _)| !is_over(*since, now));
        }
        if self.0.len() >= MOST {
            return Err(TokenLimitReached);
        }
        self.0.insert(token, (now, what));
        Ok(())
    }

    /// Removes and returns the value of a token; `None` if it is unknown or expired.
    pub fn take(&mut self, token: &str, now: Instant) -> Option<T> {
        let (since, what) = self.0.remove(token)?;
        (!is_over(since, now)).then_some(what)
    }
}

fn is_over(since: Instant, now: Instant) -> bool {
    now.saturating_duration_since(since) >= LIFE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_met_once_and_within_a_minute() {
        let (mut tokens, now) = (Tokens::default(), Instant::now());
        for (token, at) in [("a", 0), ("b", 0), ("c", 1)] {
            assert_eq!(tokens.keep(token.to_owned(), token, now + Duration::from_secs(at)), Ok(()));
        }
        assert_eq!(tokens.take("a", now), Some("a"));
        assert_eq!(tokens.take("a", now), None, "used");
        assert_eq!(tokens.take("b", now + LIFE), None, "too late");
        assert_eq!(tokens.take("c", now + LIFE), Some("c"));
        assert_eq!(tokens.take("d", now), None);
    }

    #[test]
    fn a_thousand_wait_and_no_more() {
        let (mut tokens, now) = (Tokens::default(), Instant::now());
        for number in 0..MOST {
            assert_eq!(tokens.keep(number.to_string(), number, now), Ok(()));
        }
        assert_eq!(tokens.keep("one more".to_owned(), 0, now + LIFE - Duration::from_secs(1)), Err(TokenLimitReached));
        assert_eq!(tokens.keep("later".to_owned(), 0, now + LIFE), Ok(()), "expired tokens are removed");
        assert_eq!(tokens.0.len(), 1);
    }
}
