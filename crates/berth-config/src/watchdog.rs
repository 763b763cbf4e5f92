//! systemd watchdog timeout from the environment. Pure. Spec 01 §8.2.

use std::time::Duration;

use super::{GoDuration, text::quote};

/// Watchdog variables that the service manager sets.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct WatchdogEnvironment {
    /// `WATCHDOG_USEC`.
    pub microseconds: Option<String>,
    /// `WATCHDOG_PID`.
    pub pid: Option<String>,
    /// PID of this process.
    pub own_pid: u32,
}

/// Returns the watchdog timeout of the service manager; `None` if it does not watch this process.
///
/// # Errors
/// A variable is malformed, or the timeout is too short to meet.
pub fn watchdog_timeout(environment: &WatchdogEnvironment) -> Result<Option<Duration>, String> {
    let Some(text) = environment.microseconds.as_deref().filter(|text| !text.is_empty()) else { return Ok(None) };
    let failed = |why: String| format!("create health checker: configure watchdog: {why}");
    let microseconds: i64 = text.parse().map_err(|_| {
        failed(format!("error converting WATCHDOG_USEC: strconv.Atoi: parsing {}: invalid syntax", quote(text)))
    })?;
    if microseconds <= 0 {
        return Err(failed("error WATCHDOG_USEC must be a positive number".to_owned()));
    }
    if let Some(pid) = environment.pid.as_deref().filter(|pid| !pid.is_empty()) {
        let pid: u32 = pid.parse().map_err(|_| {
            failed(format!("error converting WATCHDOG_PID: strconv.Atoi: parsing {}: invalid syntax", quote(pid)))
        })?;
        if pid != environment.own_pid {
            return Ok(None);
        }
    }
    let timeout = GoDuration::from_nanos(microseconds.saturating_mul(1000));
    if timeout <= GoDuration::from_secs(1) {
        return Err(format!("create health checker: configure watchdog timeout too small: {timeout}"));
    }
    Ok(Some(timeout.std()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_timeout_is_for_us_and_long_enough() {
        let timeout = |usec: Option<&str>, pid: Option<&str>| {
            let environment =
                WatchdogEnvironment { microseconds: usec.map(str::to_owned), pid: pid.map(str::to_owned), own_pid: 7 };
            watchdog_timeout(&environment)
        };
        assert_eq!(timeout(None, None), Ok(None));
        assert_eq!(timeout(Some("20000000"), None), Ok(Some(Duration::from_secs(20))));
        assert_eq!(timeout(Some("20000000"), Some("7")), Ok(Some(Duration::from_secs(20))));
        assert_eq!(timeout(Some("20000000"), Some("8")), Ok(None));
        for (usec, error) in [
            ("1000000", "create health checker: configure watchdog timeout too small: 1s"), // AC-01-28
            ("0", "create health checker: configure watchdog: error WATCHDOG_USEC must be a positive number"),
            (
                "x",
                "create health checker: configure watchdog: error converting WATCHDOG_USEC: strconv.Atoi: parsing \
                 \"x\": invalid syntax",
            ),
        ] {
            assert_eq!(timeout(Some(usec), None), Err(error.to_owned()));
        }
    }
}
