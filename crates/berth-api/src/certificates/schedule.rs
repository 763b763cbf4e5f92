//! When to request a certificate, back-off of failed requests, and whether failures show a live server. Pure.
//!
//! Implements spec 01 §11.4.

use std::time::Duration;

use super::{leaf::Leaf, template::Template};
use crate::api::ApiError;

/// Failures after which the back-off is constant.
const STEPS: u32 = 5;
/// Back-off after the first failure.
const FIRST: Duration = Duration::from_secs(2);
/// Back-off after [`STEPS`] failures.
const LATER: Duration = Duration::from_secs(32);
/// Maximum jitter as a share of the back-off.
const JITTER: f64 = 0.1;
/// Share of the lifetime after which renewal may start.
const EARLIEST: f64 = 0.7;
/// Width of the renewal window, as a share of the lifetime.
const SPREAD: f64 = 0.2;

/// Cause in a `Status` that the client synthesized because no API server wrote one.
const MADE_UP: &str = "UnexpectedServerResponse";

/// Next action for a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// Request one.
    Now,
    /// Request one at that second since the epoch.
    At(i64),
    /// The template is not known yet.
    Unknown,
}

/// Decides whether the current certificate must be replaced; `chance` in 0..1 was drawn when it became current.
pub fn due(current: Option<(&Leaf, f64)>, template: Option<&Template>, now: i64) -> Due {
    let Some(template) = template else { return Due::Unknown };
    match current {
        Some((leaf, chance)) if leaf.covers(template) => match deadline(leaf, chance) {
            at if at <= now => Due::Now,
            at => Due::At(at),
        },
        _ => Due::Now,
    }
}

/// Renewal time in seconds since the epoch: at 70 to 90 % of the lifetime.
pub fn deadline(leaf: &Leaf, chance: f64) -> i64 {
    let life = leaf.not_after.saturating_sub(leaf.not_before);
    let share = EARLIEST + SPREAD * chance.clamp(0.0, 1.0);
    // Float casts saturate; a lifetime has far fewer than 2^53 seconds.
    leaf.not_before.saturating_add((life as f64 * share).round() as i64)
}

/// Back-off after that many consecutive failures: 2 s doubling, then 32 s; up to 10 % jitter while it grows.
pub fn retry(failures: u32, chance: f64) -> Duration {
    if failures >= STEPS {
        return LATER;
    }
    let wait = FIRST.saturating_mul(1 << failures.saturating_sub(1));
    wait.mul_f64(1.0 + JITTER * chance.clamp(0.0, 1.0))
}

/// Whether an outcome shows that an API server is up: success, 401, or a 403 or 404 whose status the server wrote.
/// These refuse the client, not the request.
pub fn server_answers(outcome: Result<(), &ApiError>) -> bool {
    match outcome {
        Ok(()) => true,
        Err(error) => match error.code() {
            401 => true,
            // A synthesized status may come from any HTTP server.
            403 | 404 => error.status().is_some_and(|status| !status.causes.iter().any(|c| c.reason == MADE_UP)),
            _ => false,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        api::{ApiStatus, ApiStatusCause},
        testing::refused,
    };

    fn leaf(not_before: i64, not_after: i64) -> Leaf {
        let template = Template::client("n");
        Leaf {
            common_name: template.common_name(),
            organizations: vec![Template::ORGANIZATION.to_owned()],
            dns: Vec::new(),
            ips: Vec::new(),
            not_before,
            not_after,
        }
    }

    #[test]
    fn a_certificate_is_replaced_at_seventy_to_ninety_percent_of_its_life() {
        const HOUR: i64 = 3600;
        // AC-01-33
        for (chance, expected) in [(0.0, 70 * HOUR), (0.5, 80 * HOUR), (1.0, 90 * HOUR), (7.0, 90 * HOUR)] {
            assert_eq!(deadline(&leaf(0, 100 * HOUR), chance), expected, "{chance}");
        }
        assert_eq!(deadline(&leaf(1000, 2000), 0.0), 1700);
    }

    #[test]
    fn what_is_due() {
        let template = Template::client("n");
        let mut other = leaf(0, 100);
        other.common_name = "system:node:m".to_owned();
        let mut alone = leaf(0, 100);
        alone.organizations.clear();
        let mut more = leaf(0, 100);
        more.dns.push("extra".to_owned());
        let good = leaf(0, 100);
        for (current, template, now, expected) in [
            (None, None, 0, Due::Unknown),
            (Some(&good), None, 0, Due::Unknown),
            (None, Some(&template), 0, Due::Now),
            (Some(&good), Some(&template), 0, Due::At(70)),
            (Some(&good), Some(&template), 69, Due::At(70)),
            (Some(&good), Some(&template), 70, Due::Now),
            (Some(&more), Some(&template), 0, Due::At(70)),
            (Some(&other), Some(&template), 0, Due::Now),
            (Some(&alone), Some(&template), 0, Due::Now),
        ] {
            assert_eq!(due(current.map(|leaf| (leaf, 0.0)), template, now), expected, "{current:?} {now}");
        }
    }

    #[test]
    fn a_serving_certificate_lacks_a_name() {
        let mut wanted = Template::client("n");
        let mut current = leaf(0, 100);
        (current.dns, current.ips) = (vec!["a".to_owned()], vec![[10, 0, 0, 1].into()]);
        assert_eq!(due(Some((&current, 0.0)), Some(&wanted), 0), Due::At(70));
        wanted.dns = vec!["b".to_owned()];
        assert_eq!(due(Some((&current, 0.0)), Some(&wanted), 0), Due::Now);
        (wanted.dns, wanted.ips) = (Vec::new(), vec![[10, 0, 0, 2].into()]);
        assert_eq!(due(Some((&current, 0.0)), Some(&wanted), 0), Due::Now);
    }

    #[test]
    fn attempts_are_spaced() {
        let seconds: Vec<f64> = (1..8).map(|failures| retry(failures, 0.0).as_secs_f64()).collect();
        assert_eq!(seconds, [2.0, 4.0, 8.0, 16.0, 32.0, 32.0, 32.0]);
        assert_eq!(retry(1, 1.0), Duration::from_millis(2200));
        assert_eq!(retry(0, 0.0), Duration::from_secs(2));
    }

    #[test]
    fn who_refuses_us_is_well() {
        let page = |code| {
            let cause = ApiStatusCause { reason: MADE_UP.to_owned(), ..ApiStatusCause::default() };
            ApiError::Refused(Box::new(ApiStatus { code, causes: vec![cause], ..ApiStatus::default() }))
        };
        for (error, expected) in [
            (refused(401, "Unauthorized", "Unauthorized"), true),
            (refused(403, "Forbidden", "no"), true),
            (refused(404, "NotFound", "no"), true),
            (page(404), false),
            (page(403), false),
            (refused(500, "InternalError", "no"), false),
            (ApiError::Unreachable("refused".to_owned()), false),
        ] {
            assert_eq!(server_answers(Err(&error)), expected, "{error:?}");
        }
        assert!(server_answers(Ok(())));
    }
}
