//! When a certificate is asked for. Pure. Spec 01 §11.4.

use std::time::Duration;

use super::{leaf::Leaf, template::Template};
use crate::api::ApiError;

/// Waits between attempts before they stay the same.
const STEPS: u32 = 5;
/// Wait after the first failure.
const FIRST: Duration = Duration::from_secs(2);
/// Wait after many.
const LATER: Duration = Duration::from_secs(32);
/// How much longer a wait may be, as a share of it.
const JITTER: f64 = 0.1;
/// Share of its life after which a certificate may be replaced.
const EARLIEST: f64 = 0.7;
/// How much later it may be, as a share of its life.
const SPREAD: f64 = 0.2;

/// The cause in a refusal that no API server put into words.
const MADE_UP: &str = "UnexpectedServerResponse";

/// What is to be done about a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// Ask for one.
    Now,
    /// Ask at that second since the epoch.
    At(i64),
    /// Nobody knows yet what it should say.
    Unknown,
}

/// Whether the current certificate is to be replaced; `chance` in 0..1 was drawn with it.
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

/// When a certificate is replaced: at 70 to 90 % of its life.
pub fn deadline(leaf: &Leaf, chance: f64) -> i64 {
    let life = leaf.not_after.saturating_sub(leaf.not_before);
    let share = EARLIEST + SPREAD * chance.clamp(0.0, 1.0);
    // A cast of floats saturates; a life has far fewer than 2^53 seconds.
    leaf.not_before.saturating_add((life as f64 * share).round() as i64)
}

/// How long to wait after so many failures in a row: 2 s doubling, then 32 s for ever.
pub fn retry(failures: u32, chance: f64) -> Duration {
    if failures >= STEPS {
        return LATER;
    }
    let wait = FIRST.saturating_mul(1 << failures.saturating_sub(1));
    wait.mul_f64(1.0 + JITTER * chance.clamp(0.0, 1.0))
}

/// Whether an answer shows that an API server is there and well: it gave one, or refused us and not
/// the request.
pub fn server_answers(outcome: Result<(), &ApiError>) -> bool {
    match outcome {
        Ok(()) => true,
        Err(error) => match error.code() {
            401 => true,
            // A page that says so may be anybody's.
            403 | 404 => error.status().is_some_and(|status| !status.causes.iter().any(|c| c.reason == MADE_UP)),
            _ => false,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        api::{ApiStatus, Cause},
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
            let cause = Cause { reason: MADE_UP.to_owned(), ..Cause::default() };
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
