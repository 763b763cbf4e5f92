//! The name of what a pod is waiting for, so that every wait can be shown; and what it waited for before.

use std::{
    borrow::Cow,
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

/// Stages a pod remembers; those of its start are the first.
const STAGES: usize = 24;
/// Errors a pod remembers.
const ERRORS: usize = 5;
/// Longest error that is remembered, characters.
const ERROR_TEXT: usize = 1024;

/// What a pod waits for, and since when.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageView {
    /// E.g. `RunPodSandbox`, `image busybox:latest`, `grace period`.
    pub name: Cow<'static, str>,
    /// Since when.
    pub since: Instant,
    /// When the wait ends by itself, where that is known.
    pub until: Option<Instant>,
}

/// How long a stage took.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PassedStage {
    /// Its name.
    pub name: Cow<'static, str>,
    /// How often it was passed.
    pub times: u64,
    /// The first time: that of the pod's start.
    pub first: Duration,
    /// The last time.
    pub last: Duration,
    /// The longest.
    pub longest: Duration,
}

/// Why a turn failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageError {
    /// Why.
    pub text: String,
    /// How often in a row.
    pub times: u64,
    /// When first.
    pub first: Instant,
    /// When last.
    pub last: Instant,
}

#[derive(Debug)]
struct State {
    now: StageView,
    rests: bool,
    /// What was last rested for, and since when: a turn between two rests for the same ends none.
    rest: Option<(&'static str, Instant)>,
    passed: Vec<Lap>,
    errors: VecDeque<StageError>,
}

/// A [`PassedStage`] as it is kept: each pod has a dozen of them. In seconds; what seven digits do not tell of a
/// stage nobody asks.
#[derive(Debug)]
struct Lap {
    name: Cow<'static, str>,
    times: u32,
    first: f32,
    last: f32,
    longest: f32,
}

impl Lap {
    fn view(&self) -> PassedStage {
        let lasted = |seconds: f32| Duration::try_from_secs_f32(seconds).unwrap_or(Duration::MAX);
        PassedStage {
            name: self.name.clone(),
            times: self.times.into(),
            first: lasted(self.first),
            last: lasted(self.last),
            longest: lasted(self.longest),
        }
    }
}

/// A worker's current stage: written by who waits, read by `why` and the server.
/// Cheap to clone; the lock is held for a copy only, never across an await.
#[derive(Clone, Debug)]
pub struct Stage(Arc<Mutex<State>>);

impl Stage {
    /// Starts as `idle`.
    pub fn new() -> Self {
        let now = StageView { name: "idle".into(), since: Instant::now(), until: None };
        let (passed, errors) = (Vec::new(), VecDeque::new());
        Self(Arc::new(Mutex::new(State { now, rests: true, rest: None, passed, errors })))
    }

    /// Enters a stage.
    pub fn set(&self, name: impl Into<Cow<'static, str>>) {
        let now = Instant::now();
        let mut state = self.lock();
        state.pass(now);
        state.now = StageView { name: name.into(), since: now, until: None };
    }

    /// Rests between two turns. A rest for the same as the last one goes on.
    pub fn rest(&self, name: &'static str, until: Option<Instant>) {
        let now = Instant::now();
        let mut state = self.lock();
        state.pass(now);
        let since = state.rest.filter(|(last, _)| *last == name).map_or(now, |(_, since)| since);
        state.rest = Some((name, since));
        state.rests = true;
        state.now = StageView { name: name.into(), since, until };
    }

    /// Remembers why a turn failed.
    pub fn failed(&self, text: &str) {
        let text: String = text.chars().take(ERROR_TEXT).collect();
        let now = Instant::now();
        let mut state = self.lock();
        if let Some(known) = state.errors.back_mut().filter(|known| known.text == text) {
            (known.times, known.last) = (known.times.saturating_add(1), now);
            return;
        }
        if state.errors.len() == ERRORS {
            state.errors.pop_front();
        }
        state.errors.push_back(StageError { text, times: 1, first: now, last: now });
    }

    /// The current stage.
    pub fn view(&self) -> StageView {
        self.lock().now.clone()
    }

    /// How long stages took, in the order in which they were first entered.
    pub fn passed(&self) -> Vec<PassedStage> {
        self.lock().passed.iter().map(Lap::view).collect()
    }

    /// Why turns failed, the latest last.
    pub fn errors(&self) -> Vec<StageError> {
        self.lock().errors.iter().cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// The current stage is over.
    fn pass(&mut self, now: Instant) {
        if std::mem::take(&mut self.rests) {
            return;
        }
        let took = now.saturating_duration_since(self.now.since).as_secs_f32();
        if let Some(known) = self.passed.iter_mut().find(|known| known.name == self.now.name) {
            known.times = known.times.saturating_add(1);
            (known.last, known.longest) = (took, known.longest.max(took));
        } else {
            // How it started is worth more than what came long after.
            self.passed.truncate(STAGES - 1);
            // There are few, they stay, and each pod has its own.
            self.passed.reserve_exact(1);
            let name = self.now.name.clone();
            self.passed.push(Lap { name, times: 1, first: took, last: took, longest: took });
        }
    }
}

impl Default for Stage {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn stages_are_remembered_with_what_they_took() {
        let (stage, second) = (Stage::new(), Duration::from_secs(1));
        for seconds in [3, 5, 1] {
            stage.set("volumes");
            tokio::time::advance(second * seconds).await;
            stage.set(String::from("image a"));
            tokio::time::advance(second).await;
            stage.rest("idle", None);
            tokio::time::advance(second * 60).await;
        }
        let names: Vec<_> = stage.passed().into_iter().map(|s| (s.name.into_owned(), s.times)).collect();
        assert_eq!(names, [("volumes".to_owned(), 3), ("image a".to_owned(), 3)]);
        let volumes = stage.passed().remove(0);
        assert_eq!((volumes.first, volumes.last, volumes.longest), (second * 3, second, second * 5));
        for number in 0..100 {
            stage.set(format!("container {number}"));
        }
        assert_eq!(stage.passed().len(), STAGES);
        assert_eq!(stage.passed()[0].name, "volumes", "the start is not forgotten");
    }

    #[tokio::test(start_paused = true)]
    async fn a_rest_for_the_same_goes_on() {
        let (stage, second, begun) = (Stage::new(), Duration::from_secs(1), Instant::now());
        for turn in 0..3 {
            stage.set("runtime status");
            let until = Some(Instant::now() + second * 10);
            stage.rest("back-off", until);
            assert_eq!((stage.view().since, stage.view().until), (begun, until), "{turn}");
            tokio::time::advance(second * 10).await;
        }
        stage.set("runtime status");
        assert_eq!(stage.view().since, begun + second * 30, "a turn is its own wait");
        stage.rest("idle", None);
        assert_eq!(stage.view().since, begun + second * 30);
    }

    #[tokio::test(start_paused = true)]
    async fn errors_are_counted_and_bounded() {
        let stage = Stage::new();
        for text in ["a", "a", "b"] {
            stage.failed(text);
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        let told: Vec<_> = stage.errors().into_iter().map(|e| (e.text, e.times)).collect();
        assert_eq!(told, [("a".to_owned(), 2), ("b".to_owned(), 1)]);
        for number in 0..10 {
            stage.failed(&format!("{number}{}", "x".repeat(10_000)));
        }
        assert_eq!(stage.errors().len(), ERRORS);
        assert!(stage.errors().iter().all(|error| error.text.chars().count() == ERROR_TEXT));
    }
}
