//! The phase of a pod from its container statuses. Pure. Implements spec 02b §4.

use std::fmt;

use super::lookup::{ContainerStateRef, find, last_exit, state};
use berth_types::{Pod, api, restart_decision::restarts_after_exit};

/// Reason of a state left by a restart of all containers.
pub const RESTARTING_ALL: &str = "RestartingAllContainers";

/// Value of `status.phase`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Phase {
    /// Some containers have not been started yet.
    Pending,
    /// At least one container runs or will restart.
    Running,
    /// All containers succeeded.
    Succeeded,
    /// A container failed permanently.
    Failed,
}

impl Phase {
    /// Text in the API.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "Pending",
            Self::Running => "Running",
            Self::Succeeded => "Succeeded",
            Self::Failed => "Failed",
        }
    }

    /// Parses the text in the API; `None` for anything else.
    pub fn parse(text: &str) -> Option<Self> {
        [Self::Pending, Self::Running, Self::Succeeded, Self::Failed].into_iter().find(|p| p.as_str() == text)
    }

    /// Phase of a status; `None` where unset or unknown.
    pub fn of(status: &api::PodStatus) -> Option<Self> {
        Self::parse(status.phase.as_deref()?)
    }

    /// Whether the phase is `Succeeded` or `Failed`.
    pub fn is_terminal(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed)
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Pod spec and container statuses from which the phase is computed.
pub struct PhaseInput<'a> {
    /// Pod whose spec lists the containers and the restart policy.
    pub pod: &'a Pod,
    /// Statuses of init containers.
    pub init: &'a [api::ContainerStatus],
    /// Statuses of regular containers.
    pub regular: &'a [api::ContainerStatus],
    /// Whether all containers are stopped permanently.
    pub terminal_build: bool,
    /// Whether a regular container exists in the current sandbox.
    pub initialized: bool,
}

#[derive(Default)]
struct Counts {
    failed_final: usize,
    pending_init: usize,
    pending_sidecar: usize,
    unknown: usize,
    running: usize,
    waiting: usize,
    stopped: usize,
    succeeded: usize,
    stopped_final: usize,
}

/// Computes the phase; defined for every input.
pub fn phase(input: &PhaseInput<'_>) -> Phase {
    let mut n = Counts::default();
    for container in input.pod.init_containers() {
        let status = find(input.init, &container.name);
        if Pod::is_sidecar(container) {
            n.count_sidecar(status);
        } else {
            n.count_init(input.pod, container, status);
        }
    }
    for container in input.pod.containers() {
        n.count_regular(input.pod, container, find(input.regular, &container.name));
    }
    n.verdict(input)
}

impl Counts {
    fn count_init(&mut self, pod: &Pod, container: &api::Container, status: Option<&api::ContainerStatus>) {
        let exit = match status.map(state) {
            Some(ContainerStateRef::Terminated(exit)) => Some(exit),
            Some(ContainerStateRef::Waiting) => status.and_then(last_exit),
            _ => None,
        };
        match exit {
            None => self.pending_init += 1,
            Some(exit) if exit.exit_code != 0 && !restartable(pod, container, exit) => self.failed_final += 1,
            Some(_) => {}
        }
    }

    fn count_sidecar(&mut self, status: Option<&api::ContainerStatus>) {
        let Some(status) = status else {
            self.unknown += 1;
            return;
        };
        match state(status) {
            ContainerStateRef::Running => {
                self.running += 1;
                self.pending_sidecar += usize::from(status.started != Some(true));
            }
            // A terminated sidecar, even a failed one, never decides the phase.
            ContainerStateRef::Terminated(_) => {}
            ContainerStateRef::Waiting if last_exit(status).is_some() => {}
            ContainerStateRef::Waiting => {
                self.pending_sidecar += 1;
                self.waiting += 1;
            }
            ContainerStateRef::None => {
                self.pending_sidecar += 1;
                self.unknown += 1;
            }
        }
    }

    fn count_regular(&mut self, pod: &Pod, container: &api::Container, status: Option<&api::ContainerStatus>) {
        let Some(status) = status else {
            self.unknown += 1;
            return;
        };
        match (state(status), last_exit(status)) {
            (ContainerStateRef::Running, _) => self.running += 1,
            (ContainerStateRef::Terminated(exit), _) => {
                self.stopped += 1;
                self.succeeded += usize::from(exit.exit_code == 0);
                self.stopped_final += usize::from(!restartable(pod, container, exit));
            }
            (ContainerStateRef::Waiting, Some(exit)) => {
                self.stopped += 1;
                self.stopped_final += usize::from(!restartable(pod, container, exit));
            }
            (ContainerStateRef::Waiting, None) => self.waiting += 1,
            (ContainerStateRef::None, _) => self.unknown += 1,
        }
    }

    fn verdict(&self, input: &PhaseInput<'_>) -> Phase {
        let ended = if self.stopped == self.succeeded { Phase::Succeeded } else { Phase::Failed };
        if self.failed_final > 0 {
            Phase::Failed
        } else if self.pending_init > 0 || (self.pending_sidecar > 0 && !input.initialized) || self.waiting > 0 {
            Phase::Pending
        } else if self.running > 0 && self.unknown == 0 {
            Phase::Running
        } else if self.running == 0 && self.stopped > 0 && self.unknown == 0 {
            if input.terminal_build && !input.pod.is_static() {
                ended
            } else if self.stopped != self.stopped_final {
                Phase::Running
            } else {
                ended
            }
        } else {
            Phase::Pending
        }
    }
}

fn restartable(pod: &Pod, container: &api::Container, exit: &api::ContainerStateTerminated) -> bool {
    restarts_after_exit(pod, container, exit.exit_code) || exit.reason.as_deref() == Some(RESTARTING_ALL)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{exited, pod, running, status, waiting, waiting_after};
    use proptest::prelude::*;

    /// `policy`, then containers as name (`i…` init, `s…` sidecar, otherwise regular) and state.
    fn phase_of(policy: &str, containers: &[(&str, serde_json::Value)], terminal: bool) -> Phase {
        let names: Vec<&str> = containers.iter().map(|(n, _)| *n).collect();
        let pod = pod(policy, &names);
        let statuses: Vec<api::ContainerStatus> = containers.iter().map(|(n, s)| status(n, s.clone())).collect();
        let (init, regular): (Vec<_>, Vec<_>) = statuses.into_iter().partition(|s| s.name.starts_with(['i', 's']));
        let initialized =
            regular.iter().any(|s| !matches!(state(s), ContainerStateRef::Waiting | ContainerStateRef::None));
        phase(&PhaseInput { pod: &pod, init: &init, regular: &regular, terminal_build: terminal, initialized })
    }

    #[test]
    fn the_phase_follows_the_table() {
        use Phase::*;
        for (case, policy, containers, expected) in [
            ("AC-02b-1", "Always", vec![("i", waiting()), ("c", waiting())], Pending),
            ("AC-02b-2", "Always", vec![("c", waiting_after(1))], Running),
            ("AC-02b-3", "OnFailure", vec![("c", exited(0)), ("d", exited(1))], Running),
            ("AC-02b-4", "Never", vec![("c", exited(0)), ("d", exited(1))], Failed),
            ("AC-02b-5", "Never", vec![("s", running()), ("c", exited(0))], Running),
            ("AC-02b-6", "Never", vec![("s", exited(137)), ("c", exited(0))], Succeeded),
            ("AC-02b-9", "Always", vec![("c", waiting_after(137))], Running),
            ("all well", "OnFailure", vec![("c", exited(0)), ("d", exited(0))], Succeeded),
            ("always restarts", "Always", vec![("c", exited(0))], Running),
            ("init runs", "Never", vec![("i", running()), ("c", waiting())], Pending),
            ("init failed for good", "Never", vec![("i", exited(1)), ("c", waiting())], Failed),
            ("init fails and retries", "Always", vec![("i", exited(1)), ("c", waiting())], Pending),
            ("init failed before, waits", "Never", vec![("i", waiting_after(1)), ("c", waiting())], Failed),
            ("sidecar starts", "Always", vec![("s", waiting()), ("c", waiting())], Pending),
            ("sidecar restarts", "Always", vec![("s", waiting_after(1)), ("c", running())], Running),
            ("one still waits", "Always", vec![("c", running()), ("d", waiting())], Pending),
            ("no state at all", "Always", vec![("c", serde_json::json!({})), ("d", running())], Pending),
            ("waits after success, never restarts", "Never", vec![("c", waiting_after(0))], Failed),
        ] {
            assert_eq!(phase_of(policy, &containers, false), expected, "{case}");
        }
    }

    #[test]
    fn the_terminal_build_ends_pods_that_would_restart() {
        assert_eq!(phase_of("Always", &[("c", exited(0))], true), Phase::Succeeded);
        assert_eq!(phase_of("Always", &[("c", exited(1))], true), Phase::Failed);
        assert_eq!(phase_of("Always", &[("c", waiting_after(0))], true), Phase::Failed);
    }

    #[test]
    fn static_pods_are_not_forced_to_an_end() {
        let pod = crate::fixture::static_pod("Always", &["c"]);
        let regular = [status("c", exited(0))];
        let input = PhaseInput { pod: &pod, init: &[], regular: &regular, terminal_build: true, initialized: true };
        assert_eq!(phase(&input), Phase::Running);
    }

    #[test]
    fn a_restart_of_all_containers_is_no_failure() {
        let mut gone = exited(137);
        gone["terminated"]["reason"] = RESTARTING_ALL.into();
        assert_eq!(phase_of("Never", &[("c", gone.clone())], false), Phase::Running);
        assert_eq!(phase_of("Never", &[("i", gone), ("c", exited(0))], false), Phase::Succeeded);
    }

    #[test]
    fn a_restart_rule_keeps_the_pod_running() {
        // AC-02b-7
        let pod = crate::fixture::pod_with(serde_json::json!({"restartPolicy": "Never", "containers": [
            {"name": "c", "restartPolicy": "Never", "restartPolicyRules": [
                {"action": "Restart", "exitCodes": {"operator": "In", "values": [42]}}]}]}));
        for (code, expected) in [(42, Phase::Running), (1, Phase::Failed)] {
            let regular = [status("c", exited(code))];
            let input =
                PhaseInput { pod: &pod, init: &[], regular: &regular, terminal_build: false, initialized: true };
            assert_eq!(phase(&input), expected, "{code}");
        }
    }

    proptest! {
        #[test]
        fn every_input_has_a_phase(
            policy in prop_oneof!["Always", "OnFailure", "Never"],
            states in prop::collection::vec((0..3usize, 0..6usize, 0..2i32), 0..5),
            terminal in any::<bool>(),
        ) {
            let named: Vec<(String, serde_json::Value)> = states.iter().enumerate().map(|(i, (kind, state, code))| {
                let name = format!("{}{i}", ["i", "s", "c"][*kind]);
                let state = match state {
                    0 => waiting(),
                    1 => running(),
                    2 => exited(*code),
                    3 => waiting_after(*code),
                    _ => serde_json::json!({}),
                };
                (name, state)
            }).collect();
            let containers: Vec<(&str, serde_json::Value)> = named.iter().map(|(n, s)| (n.as_str(), s.clone())).collect();
            let one = phase_of(&policy, &containers, terminal);
            // A pod with running containers is never terminal, unless initialization failed permanently.
            let runs = named.iter().any(|(n, s)| !n.starts_with('i') && s.get("running").is_some());
            if runs && one == Phase::Succeeded {
                prop_assert!(false, "succeeded while running: {named:?}");
            }
        }
    }
}
