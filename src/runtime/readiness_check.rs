//! Runtime and network readiness check: polls the CRI status (spec 03a §2.3).
//!
//! The period is 5 seconds, and shorter while the runtime is not ready.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use tokio::{
    sync::watch,
    time::{Instant, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{error, info};

use berth_cri::{CriResult, RuntimeService};
use berth_ports::{HandlerFeatures, RuntimeState};
use berth_proto::cri;
use berth_sys::backoff::Backoff;

/// Polling period while the runtime is ready.
const PERIOD: Duration = Duration::from_secs(5);
/// First retry delay after a failed check; doubles up to [`PERIOD`], so that startup is fast.
const FIRST_RETRY: Duration = Duration::from_millis(100);
/// Time without a successful check after which the runtime counts as down.
const DOWN_AFTER: Duration = Duration::from_secs(30);

/// Health check of another component that counts toward the runtime's readiness: its name (`PLEG`), and
/// a function that returns its error.
pub type HealthCheck = (&'static str, Arc<dyn Fn() -> Option<String> + Send + Sync>);

/// Polls the readiness of the runtime.
pub struct RuntimeCheck {
    cri: Arc<dyn RuntimeService>,
    health: Vec<HealthCheck>,
    state: watch::Sender<Arc<RuntimeState>>,
    seen: LastSuccess,
}

/// State from successful checks.
#[derive(Clone, Default)]
struct LastSuccess {
    last_sync: Option<Instant>,
    runtime_error: Option<String>,
    network_error: Option<String>,
    handlers: BTreeMap<String, HandlerFeatures>,
    supplemental_groups_policy: bool,
}

impl RuntimeCheck {
    /// Creates a check that has not run yet, and the receiver of its results.
    pub fn new(cri: Arc<dyn RuntimeService>, health: Vec<HealthCheck>) -> (Self, watch::Receiver<Arc<RuntimeState>>) {
        let seen = LastSuccess::default();
        let (state, receiver) = watch::channel(Arc::new(evaluate(&seen, &[], Instant::now())));
        (Self { cri, health, state, seen }, receiver)
    }

    /// Polls until stopped.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut retry = Backoff::new(FIRST_RETRY, PERIOD);
        loop {
            let answer = tokio::select! {
                biased;
                () = stop.cancelled() => return,
                answer = self.ask() => answer,
            };
            self.seen = apply_status(&self.seen, answer, Instant::now());
            let troubles = self.troubles();
            let next = evaluate(&self.seen, &troubles, Instant::now());
            let well = next.runtime_error.is_none() && next.network_error.is_none();
            self.publish(next);
            let pause = if well { PERIOD } else { retry.next_delay() };
            if well {
                retry.reset();
            }
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    /// Calls the runtime's status. A call that hangs may take minutes (`runtimeRequestTimeout`): in the
    /// meantime the age of the last success is re-evaluated every period.
    async fn ask(&self) -> CriResult<cri::StatusResponse> {
        let mut answer = self.cri.status();
        loop {
            match timeout(PERIOD, &mut answer).await {
                Ok(answer) => return answer,
                Err(_) => self.publish(evaluate(&self.seen, &self.troubles(), Instant::now())),
            }
        }
    }

    fn troubles(&self) -> Vec<String> {
        let sick = self.health.iter().filter_map(|(name, check)| Some((name, check()?)));
        sick.map(|(name, trouble)| format!("{name} is not healthy: {trouble}")).collect()
    }

    fn publish(&self, next: RuntimeState) {
        self.state.send_if_modified(|known| {
            if **known == next {
                return false;
            }
            match (&known.runtime_error, &next.runtime_error) {
                (_, Some(err)) => error!(err, "The container runtime is not ready"),
                (Some(_), None) => info!("The container runtime is ready"),
                (None, None) => {}
            }
            *known = Arc::new(next);
            true
        });
    }
}

/// Applies a status response. A failed call changes nothing: the last success ages.
fn apply_status(seen: &LastSuccess, answer: CriResult<cri::StatusResponse>, now: Instant) -> LastSuccess {
    let mut next = seen.clone();
    let reply = match answer {
        Ok(reply) => reply,
        Err(err) => {
            error!(%err, "Container runtime status check failed");
            return next;
        }
    };
    let Some(status) = &reply.status else { return next };
    // Response validation guarantees both conditions; other implementations of the service may not.
    if status.conditions.len() < 2 {
        return next;
    }
    next.network_error = complaint(status, "NetworkReady").map(|c| format!("container runtime network not ready: {c}"));
    next.runtime_error = complaint(status, "RuntimeReady").map(|c| format!("container runtime not ready: {c}"));
    if next.runtime_error.is_some() {
        return next;
    }
    next.handlers = reply.runtime_handlers.iter().map(handler).collect();
    next.supplemental_groups_policy = reply.features.as_ref().is_some_and(|f| f.supplemental_groups_policy);
    next.last_sync = Some(now);
    next
}

fn handler(raw: &cri::RuntimeHandler) -> (String, HandlerFeatures) {
    let features = raw.features.as_ref();
    let known = HandlerFeatures {
        recursive_read_only_mounts: features.is_some_and(|f| f.recursive_read_only_mounts),
        user_namespaces: features.is_some_and(|f| f.user_namespaces),
    };
    (raw.name.clone(), known)
}

/// The error of one condition; `None` if it is true. Upstream prints a missing condition as `<nil>`.
fn complaint(status: &cri::RuntimeStatus, kind: &str) -> Option<String> {
    let Some(found) = status.conditions.iter().find(|c| c.r#type == kind) else {
        return Some("<nil>".to_owned());
    };
    let cri::RuntimeCondition { status, reason, message, .. } = found;
    (!status).then(|| format!("{kind}={status} reason:{reason} message:{message}"))
}

fn evaluate(seen: &LastSuccess, troubles: &[String], now: Instant) -> RuntimeState {
    let mut errors: Vec<String> = Vec::new();
    match seen.last_sync {
        None => errors.push("container runtime status check may not have completed yet".to_owned()),
        Some(last) if now.duration_since(last) >= DOWN_AFTER => errors.push("container runtime is down".to_owned()),
        Some(_) => {}
    }
    errors.extend(troubles.iter().cloned());
    errors.extend(seen.runtime_error.clone());
    RuntimeState {
        runtime_error: match errors.as_slice() {
            [] => None,
            [one] => Some(one.clone()),
            many => Some(format!("[{}]", many.join(", "))),
        },
        network_error: match (&seen.last_sync, &seen.runtime_error, &seen.network_error) {
            (None, None, None) => Some("network state unknown".to_owned()),
            (_, _, error) => error.clone(),
        },
        handlers: seen.handlers.clone(),
        supplemental_groups_policy: seen.supplemental_groups_policy,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(conditions: &[(&str, bool)]) -> CriResult<cri::StatusResponse> {
        let condition = |&(kind, status): &(&str, bool)| cri::RuntimeCondition {
            r#type: kind.to_owned(),
            status,
            reason: "R".to_owned(),
            message: "M".to_owned(),
        };
        let status = cri::RuntimeStatus { conditions: conditions.iter().map(condition).collect() };
        let features = cri::RuntimeHandlerFeatures { user_namespaces: true, ..Default::default() };
        let handler = cri::RuntimeHandler { name: "kata".to_owned(), features: Some(features) };
        Ok(cri::StatusResponse { status: Some(status), runtime_handlers: vec![handler], ..Default::default() })
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_without_both_conditions_changes_nothing() {
        // AC-03a-21
        let now = Instant::now();
        let half = apply_status(&LastSuccess::default(), reply(&[("RuntimeReady", true)]), now);
        assert!(evaluate(&half, &[], now).runtime_error.is_some());
        let full = apply_status(&half, reply(&[("RuntimeReady", true), ("NetworkReady", true), ("Odd", false)]), now);
        let state = evaluate(&full, &[], now);
        assert_eq!((state.runtime_error, state.network_error), (None, None));
        assert!(state.handlers["kata"].user_namespaces);
    }

    #[tokio::test(start_paused = true)]
    async fn an_unknown_runtime_status_is_reported_as_unknown() {
        // AC-05-28
        let now = Instant::now();
        let errors = |conditions: Option<&[(&str, bool)]>| {
            let seen =
                conditions.map_or_else(LastSuccess::default, |c| apply_status(&LastSuccess::default(), reply(c), now));
            let state = evaluate(&seen, &[], now);
            (state.runtime_error.unwrap_or_default(), state.network_error.unwrap_or_default())
        };
        let not_yet = "container runtime status check may not have completed yet";
        for (conditions, runtime, network) in [
            (None, not_yet.to_owned(), "network state unknown"),
            (
                Some(&[("RuntimeReady", true), ("NetworkReady", false)][..]),
                String::new(),
                "container runtime network not ready: NetworkReady=false reason:R message:M",
            ),
            (
                Some(&[("RuntimeReady", true), ("Odd", true)][..]),
                String::new(),
                "container runtime network not ready: <nil>",
            ),
            (
                Some(&[("Odd", true), ("NetworkReady", true)][..]),
                format!("[{not_yet}, container runtime not ready: <nil>]"),
                "",
            ),
        ] {
            assert_eq!(errors(conditions), (runtime, network.to_owned()), "{conditions:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn all_errors_are_aggregated() {
        let now = Instant::now();
        let seen =
            apply_status(&LastSuccess::default(), reply(&[("RuntimeReady", false), ("NetworkReady", true)]), now);
        let error = evaluate(&seen, &["PLEG is not healthy: x".to_owned()], now).runtime_error;
        let expected = "[container runtime status check may not have completed yet, PLEG is not healthy: x, \
                        container runtime not ready: RuntimeReady=false reason:R message:M]";
        assert_eq!(error.as_deref(), Some(expected));
    }
}
