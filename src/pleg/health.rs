//! PLEG health: age of the last successful list. Pure.
//!
//! A pod whose query hangs never makes the node unhealthy; only that pod is affected (spec 03b §15 item
//! 2).

use std::time::Duration;

/// `None` while healthy, else the text after `PLEG is not healthy: ` (spec 03b §6).
///
/// `age` is the time since the start of the last successful list.
pub fn verdict(age: Option<Duration>, threshold: Duration) -> Option<String> {
    match age {
        None => Some("pleg has yet to be successful".to_owned()),
        Some(age) if age > threshold => {
            Some(format!("pleg was last seen active {} ago; threshold is {}", go(age), go(threshold)))
        }
        Some(_) => None,
    }
}

/// Formats a duration as Go does: `3m0s`, `1h2m3.5s`, `15ms`; users and tools parse these texts.
fn go(duration: Duration) -> String {
    let nanos = duration.as_nanos();
    match nanos {
        0 => return "0s".to_owned(),
        1..1_000 => return format!("{nanos}ns"),
        1_000..1_000_000 => return format!("{}µs", decimal(nanos, 1_000)),
        1_000_000..1_000_000_000 => return format!("{}ms", decimal(nanos, 1_000_000)),
        _ => {}
    }
    let seconds = duration.as_secs();
    let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
    let rest = decimal(nanos % 60_000_000_000, 1_000_000_000);
    match (hours, minutes) {
        (0, 0) => format!("{rest}s"),
        (0, _) => format!("{minutes}m{rest}s"),
        _ => format!("{hours}h{minutes}m{rest}s"),
    }
}

/// `value / unit` without trailing zeros; `unit` is a power of ten.
fn decimal(value: u128, unit: u128) -> String {
    let (whole, part) = (value / unit, value % unit);
    if part == 0 {
        return whole.to_string();
    }
    let width = unit.ilog10() as usize;
    let digits = format!("{part:0width$}");
    format!("{whole}.{}", digits.trim_end_matches('0'))
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

    #[test]
    fn durations_print_as_in_go() {
        for (nanos, text) in [
            (0, "0s"),
            (15, "15ns"),
            (1_500, "1.5µs"),
            (15_000_000, "15ms"),
            (1_000_000_000, "1s"),
            (180_104_000_000, "3m0.104s"),
            (3_723_500_000_000, "1h2m3.5s"),
            (3_600_000_000_001, "1h0m0.000000001s"),
        ] {
            assert_eq!(go(Duration::from_nanos(nanos)), text);
        }
    }
}
