//! Why a pod is as it is: one document for people and programs.
//!
//! Gathered from what is known anyway: status, the worker's stages and errors, what probes came to.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::{
    engine::{
        Standing,
        ports::{PassedStage, StageError, StageView},
        waits::Wait,
    },
    pod::{Pod, PodRef, api},
    probes::History,
    status::lookup::{State, last_exit, state, waiting_reason},
};

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
    /// Where it is in its life: `sync`, `terminating`, `terminated`, …; `refused` where nobody works on it.
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
    /// How long each stage took, in the order of the pod's start.
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
    /// What was said the first time.
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

/// How long a stage took.
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
    /// Its worker's stage.
    pub stage: Option<StageView>,
    /// Why its turns failed.
    pub errors: Vec<StageError>,
    /// How long its stages took.
    pub passed: Vec<PassedStage>,
    /// What its probes came to, by container.
    pub probes: Vec<(String, History)>,
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
    fn wall(&self, at: Instant) -> Option<Timestamp> {
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
    let life = known.standing.map_or("refused", |standing| standing.life.label());
    Why {
        namespace: id.namespace.to_string(),
        name: id.name.to_string(),
        uid: id.uid.to_string(),
        source: known.pod.and_then(Pod::source).map(|source| source.as_str().to_owned()).unwrap_or_default(),
        phase: text(|s| &s.phase),
        reason: text(|s| &s.reason),
        message: text(|s| &s.message),
        life: life.to_owned(),
        waits: waits(known, now),
        errors: known.errors.iter().map(|error| failed(error, now)).collect(),
        containers: status.map(containers).unwrap_or_default(),
        probes: known.probes.iter().map(|(container, history)| probe(container, history)).collect(),
        unmet: status.map(unmet).unwrap_or_default(),
        stages: known.passed.iter().map(passed).collect(),
    }
}

fn waits(known: &Known<'_>, now: Now) -> Option<Waits> {
    let Some(stage) = &known.stage else {
        let in_line = known.standing.is_some_and(|standing| !standing.life.is_finished());
        let waits = Waits { stage: "turn behind another pod of its name".to_owned(), ..Waits::default() };
        return in_line.then(|| Waits { reason: Wait::Other.label().to_owned(), ..waits });
    };
    Some(Waits {
        reason: Wait::of(&stage.name)?.label().to_owned(),
        stage: stage.name.to_string(),
        since: now.wall(stage.since),
        seconds: seconds(now.steady.saturating_duration_since(stage.since)),
        until: stage.until.filter(|until| *until > now.steady).and_then(|until| now.wall(until)),
    })
}

fn failed(error: &StageError, now: Now) -> Failed {
    let StageError { text, times, first, last } = error;
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

fn probe(container: &str, history: &History) -> Probe {
    let runs = history.runs.iter().map(|run| ProbeRun {
        outcome: run.outcome.to_owned(),
        text: run.text.clone(),
        times: run.times,
        first: Some(run.first),
        last: Some(run.last),
    });
    Probe { container: container.to_owned(), kind: history.kind.to_owned(), runs: runs.collect() }
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

fn passed(stage: &PassedStage) -> Passed {
    Passed {
        stage: stage.name.to_string(),
        times: stage.times,
        first_seconds: seconds(stage.first),
        last_seconds: seconds(stage.last),
        longest_seconds: seconds(stage.longest),
    }
}

/// To the millisecond.
fn seconds(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1000.0).round() / 1000.0
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::{engine::lifecycle::Lifecycle, probes::Run};

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(1_800_000_000 + second).expect("a time")
    }

    fn id() -> PodRef {
        PodRef { uid: "u".into(), name: "web".into(), namespace: "n".into() }
    }

    #[test]
    fn what_is_known_is_told() {
        let steady = Instant::now() + Duration::from_secs(1000);
        let ago = |seconds: u64| steady - Duration::from_secs(seconds);
        let standing = Standing { id: id(), life: Lifecycle::Syncing, stage: None };
        let status: api::PodStatus = serde_json::from_value(json!({
            "phase": "Pending",
            "conditions": [{"type": "Ready", "status": "False", "reason": "ContainersNotReady", "message": "m"},
                           {"type": "PodScheduled", "status": "True"}],
            "containerStatuses": [{
                "name": "main", "image": "i", "imageID": "", "ready": false, "restartCount": 3,
                "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}},
                "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}},
            }],
        }))
        .expect("a status");
        let run = Run { outcome: "failure", text: "404".into(), times: 7, first: at(-60), last: at(-1) };
        let known = Known {
            pod: None,
            status: Some(&status),
            standing: Some(&standing),
            stage: Some(StageView {
                name: "back-off".into(),
                since: ago(30),
                until: Some(steady + Duration::from_secs(10)),
            }),
            errors: vec![StageError { text: "no".into(), times: 2, first: ago(20), last: ago(10) }],
            passed: vec![PassedStage {
                name: "volumes".into(),
                times: 2,
                first: Duration::from_micros(1_234_567),
                last: Duration::ZERO,
                longest: Duration::from_secs(2),
            }],
            probes: vec![("main".into(), History { kind: "Readiness", runs: vec![run] })],
        };
        let why = document(&id(), &known, Now { wall: at(0), steady });
        let told = serde_json::to_value(&why).expect("JSON");
        assert_eq!(
            told,
            json!({
                "namespace": "n", "name": "web", "uid": "u", "source": "", "phase": "Pending", "reason": "", "message": "",
                "life": "sync",
                "waits": {"stage": "back-off", "reason": "back_off", "since": "2027-01-15T07:59:30Z", "seconds": 30.0,
                          "until": "2027-01-15T08:00:10Z"},
                "errors": [{"text": "no", "times": 2, "first": "2027-01-15T07:59:40Z", "last": "2027-01-15T07:59:50Z"}],
                "containers": [{"name": "main", "state": "waiting", "reason": "CrashLoopBackOff",
                    "message": "back-off 40s", "ready": false, "restarts": 3,
                    "lastExit": {"code": 137, "reason": "OOMKilled", "at": null}}],
                "probes": [{"container": "main", "kind": "Readiness", "runs": [{"outcome": "failure", "text": "404",
                    "times": 7, "first": "2027-01-15T07:59:00Z", "last": "2027-01-15T07:59:59Z"}]}],
                "unmet": [{"type": "Ready", "reason": "ContainersNotReady", "message": "m"}],
                "stages": [{"stage": "volumes", "times": 2, "firstSeconds": 1.235, "lastSeconds": 0.0,
                    "longestSeconds": 2.0}],
            })
        );
        assert_eq!(serde_json::from_value::<Why>(told).expect("read back"), why);
    }

    #[test]
    fn who_waits_for_nothing_says_so() {
        let now = Now { wall: at(0), steady: Instant::now() };
        let idle = StageView { name: "idle".into(), since: now.steady, until: None };
        let standing = Standing { id: id(), life: Lifecycle::Syncing, stage: None };
        let idles = Known { standing: Some(&standing), stage: Some(idle), ..Known::default() };
        assert_eq!(document(&id(), &idles, now).waits, None);
        let in_line = document(&id(), &Known { standing: Some(&standing), ..Known::default() }, now);
        assert_eq!(in_line.waits.map(|waits| waits.stage).as_deref(), Some("turn behind another pod of its name"));
        let refused = document(&id(), &Known::default(), now);
        assert_eq!((refused.life.as_str(), refused.waits), ("refused", None));
    }
}
