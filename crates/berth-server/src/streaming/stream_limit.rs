//! Limit of concurrent streams per caller (spec 04 §11).

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use crate::RequestMetricsGuard;

/// Counts open streams by caller.
pub struct CallerLimit {
    most: usize,
    open: Mutex<HashMap<String, usize>>,
}

/// Permit for one stream; released when dropped.
pub struct Permit {
    caps: Arc<CallerLimit>,
    caller: String,
    /// Keeps the request in flight in the metrics as long as the stream lasts.
    _metered: Option<RequestMetricsGuard>,
}

impl CallerLimit {
    /// Allows `most` streams per caller.
    pub fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { most, open: Mutex::default() })
    }

    /// Takes a permit for one more stream of a caller; `None` at the limit.
    pub fn take(self: &Arc<Self>, caller: &str) -> Option<Permit> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let count = open.get(caller).copied().unwrap_or(0);
        if count >= self.most {
            return None;
        }
        open.insert(caller.to_owned(), count + 1);
        Some(Permit { caps: self.clone(), caller: caller.to_owned(), _metered: None })
    }
}

impl Permit {
    /// Attaches the metrics guard of the request, so that it lasts as long as the stream.
    pub fn counting(self, metered: Option<RequestMetricsGuard>) -> Self {
        let mut counting = self;
        counting._metered = metered;
        counting
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut open = self.caps.open.lock().unwrap_or_else(PoisonError::into_inner);
        match open.get_mut(&self.caller) {
            Some(count) if *count > 1 => *count -= 1,
            _ => {
                open.remove(&self.caller);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_caller_has_its_own_share_and_gives_it_back() {
        let caps = CallerLimit::new(2);
        let permits = [caps.take("a"), caps.take("a")];
        assert!(permits.iter().all(Option::is_some));
        assert!(caps.take("a").is_none());
        assert!(caps.take("b").is_some());
        drop(permits);
        assert!(caps.open.lock().expect("whole").is_empty(), "no entry remains without open streams");
        assert!(caps.take("a").is_some());
    }
}
