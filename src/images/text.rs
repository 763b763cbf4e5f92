//! Durations as event texts show them (spec 03b, head): `345ms`, `1.234s`, `1m2.5s`. Pure.

use std::time::Duration;

/// Cut to milliseconds, in the short form of Go.
pub fn short(duration: Duration) -> String {
    let millis = duration.as_millis();
    if millis == 0 {
        return "0s".to_owned();
    }
    if millis < 1000 {
        return format!("{millis}ms");
    }
    let (minutes, below) = (millis / 60_000, millis % 60_000);
    let seconds = match below % 1000 {
        0 => (below / 1000).to_string(),
        fraction => format!("{}.{}", below / 1000, format!("{fraction:03}").trim_end_matches('0')),
    };
    match (minutes / 60, minutes % 60) {
        (0, 0) => format!("{seconds}s"),
        (0, minutes) => format!("{minutes}m{seconds}s"),
        (hours, minutes) => format!("{hours}h{minutes}m{seconds}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations() {
        let rows = [
            (0, "0s"),
            (345, "345ms"),
            (1234, "1.234s"),
            (1200, "1.2s"),
            (62_500, "1m2.5s"),
            (60_000, "1m0s"),
            (3_600_000, "1h0m0s"),
        ];
        for (millis, text) in rows {
            assert_eq!(short(Duration::from_micros(millis * 1000 + 999)), text);
        }
    }
}
