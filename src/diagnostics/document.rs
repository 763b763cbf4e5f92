//! Why a pod is as it is: one document for people and programs.
//!
//! Gathered from what is known anyway: status, the worker's steps and errors, what probes came to.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::waiting::waits;
use crate::{
    engine::{Line, Standing},
    probes::History,
};
use berth_ports::{StepTiming, StepView, SyncError};
use berth_status::lookup::{State, last_exit, state, waiting_reason};
use berth_types::{Pod, PodRef, api};

/// The document of `/debug/why/{namespace}/{pod}`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Why {
    /// The pod's namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its UID.
    pub uid: String,
    /// Who wants it; empty where nobody does any more.
    pub source: String,
    /// `status.phase`; empty before there is a status.
    pub phase: String,
    /// `status.reason`.
    pub reason: String,
    /// `status.message`.
    pub message: String,
    /// Where it is in its life: `sync`, `terminating`, `terminated`, …; `preempting` where others are killed for it first,
    /// `admission` where it waits for the node's labels, `refused` where nobody works on it.
    pub life: String,
    /// What it waits for.
    pub waits: Option<Waits>,
    /// Why turns failed, the latest last.
    pub errors: Vec<Failed>,
    /// Its containers.
    pub containers: Vec<Container>,
    /// What its probes came to.
    pub probes: Vec<Probe>,
    /// Its conditions that do not hold.
    pub unmet: Vec<Condition>,
    /// How long each step took, in the order of the pod's start.
    pub stages: Vec<Passed>,
}

/// A wait.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Waits {
    /// What for, in the agent's words.
    pub stage: String,
    /// The same as the label of `berth_pod_waiting_seconds`.
    pub reason: String,
    /// Since when; `None` where nobody noted it.
    pub since: Option<Timestamp>,
    /// For how long, seconds.
    pub seconds: f64,
    /// When it ends by itself.
    pub until: Option<Timestamp>,
}

/// A failure.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Failed {
    /// Why.
    pub text: String,
    /// How often in a row.
    pub times: u64,
    /// When first.
    pub first: Option<Timestamp>,
    /// When last.
    pub last: Option<Timestamp>,
}

/// A container.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Container {
    /// Its name.
    pub name: String,
    /// `running`, `waiting`, `terminated`; `unknown` before there is a status.
    pub state: String,
    /// Why.
    pub reason: String,
    /// More about that.
    pub message: String,
    /// Whether it is ready.
    pub ready: bool,
    /// How often it was started again.
    pub restarts: i32,
    /// How its last instance ended.
    pub last_exit: Option<Exit>,
}

/// An end.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Exit {
    /// The exit code.
    pub code: i32,
    /// `Error`, `OOMKilled`, …
    pub reason: String,
    /// When.
    pub at: Option<Timestamp>,
}

/// A probe.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Probe {
    /// Whom it asks.
    pub container: String,
    /// Whether that is the instance before the one of today.
    pub previous: bool,
    /// `Liveness`, `Readiness` or `Startup`.
    pub kind: String,
    /// Attempts in a row that came to the same, the latest last.
    pub runs: Vec<ProbeRun>,
}

/// Attempts in a row that came to the same.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ProbeRun {
    /// `success`, `warning`, `failure` or `error`.
    pub outcome: String,
    /// What was said the last time.
    pub text: String,
    /// How many.
    pub times: u64,
    /// When the first ended.
    pub first: Option<Timestamp>,
    /// When the last ended.
    pub last: Option<Timestamp>,
}

/// A condition that does not hold.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Condition {
    /// Its type.
    #[serde(rename = "type")]
    pub kind: String,
    /// Why.
    pub reason: String,
    /// More about that.
    pub message: String,
}

/// How long a step took.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Passed {
    /// Its name.
    pub stage: String,
    /// How often it was passed.
    pub times: u64,
    /// Seconds the first time, when the pod started.
    pub first_seconds: f64,
    /// Seconds the last time.
    pub last_seconds: f64,
    /// Most seconds.
    pub longest_seconds: f64,
}

/// What is known of a pod.
#[derive(Default)]
pub struct Known<'a> {
    /// Its definition, where somebody wants it.
    pub pod: Option<&'a Pod>,
    /// Its status.
    pub status: Option<&'a api::PodStatus>,
    /// Where it stands, where somebody works on it.
    pub standing: Option<&'a Standing>,
    /// What its worker waits for, or the pod before it has one.
    pub step: Option<StepView>,
    /// Why its turns failed.
    pub errors: Vec<SyncError>,
    /// How long its steps took.
    pub timings: Vec<StepTiming>,
    /// What its probes came to, by container and instance.
    pub probes: Vec<Probed>,
}

/// What a probe of a container came to.
pub struct Probed {
    /// Of which container.
    pub container: String,
    /// Of which of its instances.
    pub instance: Instance,
    /// What it came to.
    pub history: History,
}

/// An instance of a container.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Instance {
    /// That of today.
    Current,
    /// The one before.
    Previous,
}

/// The present, by both clocks.
#[derive(Clone, Copy, Debug)]
pub struct Now {
    /// As people tell it.
    pub wall: Timestamp,
    /// As time passes.
    pub steady: Instant,
}

impl Now {
    /// A moment as people tell it.
    pub(super) fn wall(&self, at: Instant) -> Option<Timestamp> {
        let signed = |duration: Duration| SignedDuration::try_from(duration).ok();
        match at.checked_duration_since(self.steady) {
            Some(ahead) => self.wall.checked_add(signed(ahead)?).ok(),
            None => self.wall.checked_sub(signed(self.steady.saturating_duration_since(at))?).ok(),
        }
    }
}

/// The document of what is known.
pub fn document(id: &PodRef, known: &Known<'_>, now: Now) -> Why {
    let status = known.status;
    let text = |of: fn(&api::PodStatus) -> &Option<String>| status.and_then(|s| of(s).clone()).unwrap_or_default();
    let life = match known.standing {
        None => "refused",
        Some(Standing { line: Some((Line::Preemption, _)), .. }) => "preempting",
        Some(Standing { line: Some((Line::NodeLabels, _)), .. }) => "admission",
        Some(standing) => standing.life.label(),
    };
    Why {
        namespace: id.namespace.to_string(),
        name: id.name.to_string(),
        uid: id.uid.to_string(),
        source: known.pod.and_then(Pod::source).map(|source| source.as_str().to_owned()).unwrap_or_default(),
        phase: text(|s| &s.phase),
        reason: text(|s| &s.reason),
        message: text(|s| &s.message),
        life: life.to_owned(),
        waits: waits(known.step.as_ref(), known.pod, status, now),
        errors: known.errors.iter().map(|error| failed(error, now)).collect(),
        containers: status.map(containers).unwrap_or_default(),
        probes: known.probes.iter().map(probe).collect(),
        unmet: status.map(unmet).unwrap_or_default(),
        stages: known.timings.iter().map(passed).collect(),
    }
}

fn failed(error: &SyncError, now: Now) -> Failed {
    let SyncError { text, times, first, last } = error;
    Failed { text: text.clone(), times: *times, first: now.wall(*first), last: now.wall(*last) }
}

fn containers(status: &api::PodStatus) -> Vec<Container> {
    let of = |status: &api::ContainerStatus| {
        let (name, reason, message) = match state(status) {
            State::Running => ("running", None, None),
            State::Terminated(exit) => ("terminated", exit.reason.as_deref(), exit.message.as_deref()),
            State::Waiting => {
                let waiting = status.state.as_ref().and_then(|state| state.waiting.as_ref());
                ("waiting", waiting_reason(status), waiting.and_then(|waiting| waiting.message.as_deref()))
            }
            State::None => ("unknown", None, None),
        };
        let exit = last_exit(status).map(|exit| Exit {
            code: exit.exit_code,
            reason: exit.reason.clone().unwrap_or_default(),
            at: exit.finished_at.as_ref().map(|time| time.0),
        });
        Container {
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

fn probe(probed: &Probed) -> Probe {
    let Probed { container, instance, history } = probed;
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

/// A pod that has ended fulfils none, and need not.
fn unmet(status: &api::PodStatus) -> Vec<Condition> {
    if matches!(status.phase.as_deref(), Some("Succeeded" | "Failed")) {
        return Vec::new();
    }
    let unmet = status.conditions.iter().flatten().filter(|condition| condition.status == "False");
    let told = unmet.map(|condition| Condition {
        kind: condition.type_.clone(),
        reason: condition.reason.clone().unwrap_or_default(),
        message: condition.message.clone().unwrap_or_default(),
    });
    told.collect()
}

fn passed(step: &StepTiming) -> Passed {
    Passed {
        stage: step.name.to_string(),
        times: step.times,
        first_seconds: seconds(step.first),
        last_seconds: seconds(step.last),
        longest_seconds: seconds(step.longest),
    }
}

/// To the millisecond.
pub(super) fn seconds(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1000.0).round() / 1000.0
}

#[cfg(test)]
mod tests;
