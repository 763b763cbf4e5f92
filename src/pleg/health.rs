//! PLEG health: age of the last successful list. Pure.
//!
//! A pod whose query hangs never makes the node unhealthy; only that pod is affected (spec 03b §15 item
//! 2).

use std::time::Duration;

use berth_types::go_duration::GoDuration;

/// `None` while healthy, else the text after `PLEG is not healthy: ` (spec 03b §6).
///
/// `age` is the time since the start of the last successful list.
pub fn verdict(age: Option<Duration>, threshold: Duration) -> Option<String> {
    match age {
        None => Some("pleg has yet to be successful".to_owned()),
        Some(age) if age > threshold => {
            let (age, threshold) = (GoDuration::from(age), GoDuration::from(threshold));
            Some(format!("pleg was last seen active {age} ago; threshold is {threshold}"))
        }
        Some(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const THRESHOLD: Duration = Duration::from_secs(180);

    #[test]
    fn health_is_the_age_of_the_last_good_list() {
        assert_eq!(verdict(None, THRESHOLD).as_deref(), Some("pleg has yet to be successful"));
        assert_eq!(verdict(Some(THRESHOLD), THRESHOLD), None);
        // AC-03b-27
        assert_eq!(
            verdict(Some(Duration::from_secs(240)), THRESHOLD).as_deref(),
            Some("pleg was last seen active 4m0s ago; threshold is 3m0s")
        );
    }
}
