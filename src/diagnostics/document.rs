//! Pod diagnostics document: why a pod is in its current state, for people and programs.
//!
//! Built from existing data: pod status, steps and errors of the pod worker, and probe results.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::current_wait::current_wait;
use crate::{
    engine::{PodWorkerStatus, StartWait},
    probes::History,
};
use berth_ports::{StepTiming, StepView, SyncError};
use berth_status::lookup::{ContainerStateRef, last_exit, state, waiting_reason};
use berth_types::{Pod, PodRef, api};

/// Body of `/debug/why/{namespace}/{pod}`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodDiagnosis {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub name: String,
    /// UID of the pod.
    pub uid: String,
    /// Source of the pod's definition; empty if no source contains the pod any more.
    pub source: String,
    /// `status.phase`; empty before the first status.
    pub phase: String,
    /// `status.reason`.
    pub reason: String,
    /// `status.message`.
    pub message: String,
    /// What was missing if the pod was refused its CPUs or memory; empty if it was not, or if the message has it all.
    pub explanation: String,
    /// Lifecycle state: `sync`, `terminating`, `terminated`, …; `preempting` while other pods are killed to make space
    /// for it, `admission` while it waits for the node's labels, `refused` if no pod worker handles it.
    pub life: String,
    /// What the pod waits for; `None` if it waits for nothing.
    pub waits: Option<WaitInfo>,
    /// Errors of failed syncs, the latest last.
    pub errors: Vec<SyncFailure>,
    /// Init, regular, and ephemeral containers, in this order.
    pub containers: Vec<ContainerDiagnosis>,
    /// Probe results.
    pub probes: Vec<Probe>,
    /// Conditions with status `False`; empty for pods in a terminal phase.
    pub unmet: Vec<UnmetCondition>,
    /// Duration of each step, in the order of the pod's start.
    pub stages: Vec<StageTiming>,
}

/// Current wait of a pod.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct WaitInfo {
    /// Stage the pod waits in, as the agent names it.
    pub stage: String,
    /// Value of the label of `berth_pod_waiting_seconds`.
    pub reason: String,
    /// Start of the wait; `None` if unknown.
    pub since: Option<Timestamp>,
    /// Duration of the wait so far, in seconds.
    pub seconds: f64,
    /// When the wait ends by itself (a back-off or deadline, for example).
    pub until: Option<Timestamp>,
}

/// Repeated error of a sync.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SyncFailure {
    /// Error text.
    pub text: String,
    /// Number of consecutive occurrences.
    pub times: u64,
    /// First occurrence.
    pub first: Option<Timestamp>,
    /// Latest occurrence.
    pub last: Option<Timestamp>,
}

/// Status of a container.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ContainerDiagnosis {
    /// Container name.
    pub name: String,
    /// `running`, `current_wait`, or `terminated`; `unknown` before the first status.
    pub state: String,
    /// Reason of that state.
    pub reason: String,
    /// Message of that state.
    pub message: String,
    /// Readiness, `ready` of the container status.
    pub ready: bool,
    /// Number of restarts.
    pub restarts: i32,
    /// Termination of the last instance.
    pub last_exit: Option<Exit>,
}

/// Termination of a container.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Exit {
    /// Exit code.
    pub code: i32,
    /// `Error`, `OOMKilled`, …
    pub reason: String,
    /// Time of the exit.
    pub at: Option<Timestamp>,
}

/// Results of one probe.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Probe {
    /// Name of the probed container.
    pub container: String,
    /// True if the results belong to the previous instance of the container.
    pub previous: bool,
    /// `Liveness`, `Readiness` or `Startup`.
    pub kind: String,
    /// Runs of equal results, the latest last.
    pub runs: Vec<ProbeRun>,
}

/// Consecutive attempts with the same result.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ProbeRun {
    /// `success`, `warning`, `failure` or `error`.
    pub outcome: String,
    /// Output or error of the latest attempt.
    pub text: String,
    /// Number of attempts.
    pub times: u64,
    /// End of the first attempt.
    pub first: Option<Timestamp>,
    /// End of the latest attempt.
    pub last: Option<Timestamp>,
}

/// Pod condition with status `False`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct UnmetCondition {
    /// Condition type.
    #[serde(rename = "type")]
    pub kind: String,
    /// Condition reason.
    pub reason: String,
    /// Condition message.
    pub message: String,
}

/// Timing of a step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct StageTiming {
    /// Stage name.
    pub stage: String,
    /// Number of times the stage was passed.
    pub times: u64,
    /// Duration of the first pass, at the pod's start, in seconds.
    pub first_seconds: f64,
    /// Duration of the latest pass, in seconds.
    pub last_seconds: f64,
    /// Longest duration, in seconds.
    pub longest_seconds: f64,
}

/// Status reasons of pods whose resources could not be aligned or allocated.
const ALLOCATION_REASONS: [&str; 4] =
    ["EmptyPodSharedPoolError", "SMTAlignmentError", "TopologyAffinityError", "UnexpectedAdmissionError"];

/// Inputs of the document.
#[derive(Default)]
pub struct DiagnosisInputs<'a> {
    /// Definition of the pod; `None` if no source contains it.
    pub pod: Option<&'a Pod>,
    /// Status of the pod.
    pub status: Option<&'a api::PodStatus>,
    /// Status of the pod worker; `None` if there is none.
    pub standing: Option<&'a PodWorkerStatus>,
    /// Step that the pod worker waits in, or the pod before it has a worker.
    pub step: Option<StepView>,
    /// Errors of failed syncs.
    pub errors: Vec<SyncError>,
    /// Timings of the startup steps.
    pub timings: Vec<StepTiming>,
    /// Probe results by container and instance.
    pub probes: Vec<ContainerProbeHistory>,
    /// What was missing if CPUs or memory could not be aligned or allocated.
    pub refusal: Option<String>,
}

/// Results of a probe of one container instance.
pub struct ContainerProbeHistory {
    /// Container name.
    pub container: String,
    /// Instance of that container.
    pub instance: Instance,
    /// Results, the latest last.
    pub history: History,
}

/// Instance of a container.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Instance {
    /// Current instance.
    Current,
    /// Previous instance.
    Previous,
}

/// Current time of both clocks.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    /// Wall clock.
    pub wall: Timestamp,
    /// Monotonic clock.
    pub steady: Instant,
}

impl Now {
    /// Converts a monotonic instant to wall time; `None` if it is out of range.
    pub(super) fn wall(&self, at: Instant) -> Option<Timestamp> {
        let signed = |duration: Duration| SignedDuration::try_from(duration).ok();
        match at.checked_duration_since(self.steady) {
            Some(ahead) => self.wall.checked_add(signed(ahead)?).ok(),
            None => self.wall.checked_sub(signed(self.steady.saturating_duration_since(at))?).ok(),
        }
    }
}

/// Builds the document.
pub fn document(id: &PodRef, known: &DiagnosisInputs<'_>, now: Now) -> PodDiagnosis {
    let status = known.status;
    let text = |of: fn(&api::PodStatus) -> &Option<String>| status.and_then(|s| of(s).clone()).unwrap_or_default();
    let life = match known.standing {
        None => "refused",
        Some(PodWorkerStatus { line: Some((StartWait::Preemption, _)), .. }) => "preempting",
        Some(PodWorkerStatus { line: Some((StartWait::NodeLabels | StartWait::Devices, _)), .. }) => "admission",
        Some(standing) => standing.life.label(),
    };
    PodDiagnosis {
        namespace: id.namespace.to_string(),
        name: id.name.to_string(),
        uid: id.uid.to_string(),
        source: known.pod.and_then(Pod::source).map(|source| source.as_str().to_owned()).unwrap_or_default(),
        phase: text(|s| &s.phase),
        reason: text(|s| &s.reason),
        message: text(|s| &s.message),
        explanation: explanation(status, known.refusal.as_deref()),
        life: life.to_owned(),
        waits: current_wait(known.step.as_ref(), known.pod, status, now),
        errors: known.errors.iter().map(|error| failed(error, now)).collect(),
        containers: status.map(containers).unwrap_or_default(),
        probes: known.probes.iter().map(probe).collect(),
        unmet: status.map(unmet).unwrap_or_default(),
        stages: known.timings.iter().map(passed).collect(),
    }
}

/// What the status of a pod that was refused CPUs or memory leaves out of the reason of the refusal.
fn explanation(status: Option<&api::PodStatus>, refusal: Option<&str>) -> String {
    let reason = status.and_then(|status| status.reason.as_deref()).unwrap_or_default();
    let is_refused = ALLOCATION_REASONS.contains(&reason);
    let message = status.and_then(|status| status.message.as_deref()).unwrap_or_default();
    refusal.filter(|refusal| is_refused && !message.contains(refusal)).unwrap_or_default().to_owned()
}

fn failed(error: &SyncError, now: Now) -> SyncFailure {
    let SyncError { text, times, first, last } = error;
    SyncFailure { text: text.clone(), times: *times, first: now.wall(*first), last: now.wall(*last) }
}

fn containers(status: &api::PodStatus) -> Vec<ContainerDiagnosis> {
    let of = |status: &api::ContainerStatus| {
        let (name, reason, message) = match state(status) {
            ContainerStateRef::Running => ("running", None, None),
            ContainerStateRef::Terminated(exit) => ("terminated", exit.reason.as_deref(), exit.message.as_deref()),
            ContainerStateRef::Waiting => {
                let waiting = status.state.as_ref().and_then(|state| state.waiting.as_ref());
                ("waiting", waiting_reason(status), waiting.and_then(|waiting| waiting.message.as_deref()))
            }
            ContainerStateRef::None => ("unknown", None, None),
        };
        let exit = last_exit(status).map(|exit| Exit {
            code: exit.exit_code,
            reason: exit.reason.clone().unwrap_or_default(),
            at: exit.finished_at.as_ref().map(|time| time.0),
        });
        ContainerDiagnosis {
            name: status.name.clone(),
            state: name.to_owned(),
            reason: reason.unwrap_or_default().to_owned(),
            message: message.unwrap_or_default().to_owned(),
            ready: status.ready,
            restarts: status.restart_count,
            last_exit: exit,
        }
    };
    let lists = [&status.init_container_statuses, &status.container_statuses, &status.ephemeral_container_statuses];
    lists.into_iter().flatten().flatten().map(of).collect()
}

fn probe(probed: &ContainerProbeHistory) -> Probe {
    let ContainerProbeHistory { container, instance, history } = probed;
    let runs = history.runs.iter().map(|run| ProbeRun {
        outcome: run.outcome.to_owned(),
        text: run.text.clone(),
        times: run.times,
        first: Some(run.first),
        last: Some(run.last),
    });
    Probe {
        container: container.clone(),
        previous: *instance == Instance::Previous,
        kind: history.kind.to_owned(),
        runs: runs.collect(),
    }
}

/// A pod in a terminal phase does not have to meet its conditions.
fn unmet(status: &api::PodStatus) -> Vec<UnmetCondition> {
    if matches!(status.phase.as_deref(), Some("Succeeded" | "Failed")) {
        return Vec::new();
    }
    let unmet = status.conditions.iter().flatten().filter(|condition| condition.status == "False");
    let conditions = unmet.map(|condition| UnmetCondition {
        kind: condition.type_.clone(),
        reason: condition.reason.clone().unwrap_or_default(),
        message: condition.message.clone().unwrap_or_default(),
    });
    conditions.collect()
}

fn passed(step: &StepTiming) -> StageTiming {
    StageTiming {
        stage: step.name.to_string(),
        times: step.times,
        first_seconds: seconds(step.first),
        last_seconds: seconds(step.last),
        longest_seconds: seconds(step.longest),
    }
}

/// Seconds, rounded to milliseconds.
pub(super) fn seconds(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1000.0).round() / 1000.0
}

#[cfg(test)]
mod tests;
