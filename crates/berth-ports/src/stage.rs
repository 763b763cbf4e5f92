//! Progress of a pod worker: the current wait, timings of past steps, and recent errors.

use std::{
    borrow::Cow,
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

/// Minimum number of step timings stored per pod; those of its start come first.
const STAGES: usize = 24;
/// Steps of a start: the pod's own, and those of each container.
const OF_POD: usize = 8;
const OF_CONTAINER: usize = 7;
/// Maximum number of step timings stored per pod.
const MOST_STAGES: usize = 200;
/// Maximum number of errors stored per pod.
const ERRORS: usize = 5;
/// Maximum length of a stored error, characters.
const ERROR_TEXT: usize = 1024;

/// What a pod waits for, and since when.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageView {
    /// E.g. `RunPodSandbox`, `image busybox:latest`, `grace period`.
    pub name: Cow<'static, str>,
    /// Start of the wait, including failed attempts before this one.
    pub since: Instant,
    /// Deadline at which the wait ends by itself, if known.
    pub until: Option<Instant>,
}

/// Timing of a completed step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PassedStage {
    /// Name of the step.
    pub name: Cow<'static, str>,
    /// Number of executions.
    pub times: u64,
    /// Duration of the first execution: that of the pod's start.
    pub first: Duration,
    /// Duration of the last execution.
    pub last: Duration,
    /// Longest duration.
    pub longest: Duration,
}

/// Error of a failed sync.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageError {
    /// Error text, at most 1024 characters.
    pub text: String,
    /// Number of consecutive occurrences.
    pub times: u64,
    /// Time of the first occurrence.
    pub first: Instant,
    /// Time of the last occurrence.
    pub last: Instant,
}

#[derive(Debug)]
struct State {
    /// The worker's own sequential step.
    now: StageView,
    /// Start of this attempt; the wait may be older.
    entered: Instant,
    /// Whether the step is not timed: a pause, or a frame around other steps.
    untimed: bool,
    /// Concurrent steps, each of its own task; the least recently changed first.
    open: Vec<Open>,
    next_open: u32,
    /// Reason and start of the last pause: a sync between two pauses for the same reason does not reset the start.
    rest: Option<(&'static str, Instant)>,
    /// Failed steps and when they were first attempted; the latest last.
    stuck: Vec<(Cow<'static, str>, Instant)>,
    most: usize,
    passed: Vec<Lap>,
    errors: VecDeque<StageError>,
}

/// One of several concurrent steps.
#[derive(Debug)]
struct Open {
    id: u32,
    view: StageView,
    /// Start of this attempt; the wait may be older.
    entered: Instant,
}

/// Compact storage of a [`PassedStage`], in seconds: each pod has a dozen of them. `f32` has seven significant
/// digits, enough for a step.
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

/// Current step of a pod worker: written by the waiting code, read by `why` and the server.
/// Cheap to clone; the lock covers a copy only, never an await.
#[derive(Clone, Debug)]
pub struct Stage(Arc<Mutex<State>>);

/// A concurrent step; ends when this is dropped.
#[derive(Debug)]
pub struct OpenStage {
    stage: Stage,
    id: u32,
}

impl Stage {
    /// A pod of one container, in step `idle`.
    pub fn new() -> Self {
        Self::of_containers(1)
    }

    /// As [`Stage::new`], with storage for the steps of this many containers.
    pub fn of_containers(containers: usize) -> Self {
        let now = Instant::now();
        let most = containers.saturating_mul(OF_CONTAINER).saturating_add(OF_POD).clamp(STAGES, MOST_STAGES);
        Self(Arc::new(Mutex::new(State {
            now: StageView { name: "idle".into(), since: now, until: None },
            entered: now,
            untimed: true,
            open: Vec::new(),
            next_open: 0,
            rest: None,
            stuck: Vec::new(),
            most,
            passed: Vec::new(),
            errors: VecDeque::new(),
        })))
    }

    /// Enters a step. If it failed the last time, the wait counts from its first attempt.
    pub fn set(&self, name: impl Into<Cow<'static, str>>) {
        self.enter(name.into(), false);
    }

    /// Enters a frame around concurrent steps: shown while none of them runs, and not timed.
    pub fn frame(&self, name: impl Into<Cow<'static, str>>) {
        self.enter(name.into(), true);
    }

    fn enter(&self, name: Cow<'static, str>, untimed: bool) {
        let now = Instant::now();
        let mut state = self.lock();
        state.pass(now);
        let since = state.tried_since(&name).unwrap_or(now);
        (state.now, state.entered, state.untimed) = (StageView { name, since, until: None }, now, untimed);
    }

    /// Starts a concurrent step; [`Stage::view`] shows the least recently changed one.
    pub fn open(&self, name: impl Into<Cow<'static, str>>) -> OpenStage {
        let now = Instant::now();
        let mut state = self.lock();
        let id = state.next_open;
        state.next_open = id.wrapping_add(1);
        let view = state.view_of(name.into(), None, now);
        state.open.push(Open { id, view, entered: now });
        OpenStage { stage: self.clone(), id }
    }

    /// Pauses between two syncs. A pause for the same reason as the last one keeps its start; one with a deadline after
    /// a failure names the failed step.
    pub fn rest(&self, name: &'static str, until: Option<Instant>) {
        let now = Instant::now();
        let mut state = self.lock();
        state.pass(now);
        let since = state.rest.filter(|(last, _)| *last == name).map_or(now, |(_, since)| since);
        let mut told = Cow::Borrowed(name);
        if until.is_none() {
            state.stuck.clear();
        } else if let Some((stuck, _)) = state.stuck.last().filter(|(stuck, _)| *stuck != name) {
            told = format!("{name} of {stuck}").into();
        }
        state.rest = Some((name, since));
        (state.now, state.entered, state.untimed) = (StageView { name: told, since, until }, now, true);
    }

    /// Records the error of a failed sync, and that the current step failed.
    pub fn failed(&self, text: &str) {
        self.stuck();
        self.note(text);
    }

    /// Marks the current step as failed: its next attempt continues the same wait.
    pub fn stuck(&self) {
        let mut state = self.lock();
        if !state.untimed {
            let StageView { name, since, .. } = state.now.clone();
            state.get_stuck(name, since);
            // A failed attempt is timed too.
            let now = Instant::now();
            state.lap_of_now(now);
            state.untimed = true;
        }
    }

    /// Records the error of a failed sync.
    pub fn note(&self, text: &str) {
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

    /// Current step.
    pub fn view(&self) -> StageView {
        let state = self.lock();
        state.open.first().map_or(&state.now, |oldest| &oldest.view).clone()
    }

    /// Timings of completed steps, in the order of first completion.
    pub fn passed(&self) -> Vec<PassedStage> {
        self.lock().passed.iter().map(Lap::view).collect()
    }

    /// Errors of failed syncs, the latest last.
    pub fn errors(&self) -> Vec<StageError> {
        self.lock().errors.iter().cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl OpenStage {
    /// Enters the next step; the same name continues the current step.
    pub fn set(&self, name: impl Into<Cow<'static, str>>) {
        self.set_until(name, None);
    }

    /// Enters the next step, which ends by itself at `until`.
    pub fn set_until(&self, name: impl Into<Cow<'static, str>>, until: Option<Instant>) {
        let (now, name) = (Instant::now(), name.into());
        let mut state = self.stage.lock();
        let Some(at) = state.open.iter().position(|open| open.id == self.id) else { return };
        if let Some(open) = state.open.get_mut(at).filter(|open| open.view.name == name) {
            open.view.until = until;
            return;
        }
        state.lap_of_open(at, now, Came::ToAnEnd);
        let view = state.view_of(name, until, now);
        // The first entry is the one shown: the least recently changed.
        state.open.remove(at);
        state.open.push(Open { id: self.id, view, entered: now });
    }

    /// Sets the deadline at which the step ends by itself.
    pub fn until(&self, until: Instant) {
        let mut state = self.stage.lock();
        if let Some(open) = state.open.iter_mut().find(|open| open.id == self.id) {
            open.view.until = Some(until);
        }
    }

    /// Ends the step as failed: its next attempt continues the same wait.
    pub fn stuck(self) {
        self.end(Came::ToNothing);
    }

    /// Ends the step and marks the operation it belongs to as failed, under the operation's name.
    pub fn stuck_for(self, name: impl Into<Cow<'static, str>>) {
        let (mut state, name) = (self.stage.lock(), name.into());
        let entered = state.open.iter().find(|open| open.id == self.id).map(|open| open.entered);
        if let Some(since) = state.tried_since(&name).or(entered) {
            drop(state);
            self.end(Came::ToAnEnd);
            state = self.stage.lock();
            state.get_stuck(name, since);
        }
    }

    /// Clears the failure of the operation of that name.
    pub fn done_for(&self, name: &str) {
        self.stage.lock().stuck.retain(|(stuck, _)| stuck != name);
    }

    fn end(&self, came: Came) {
        let mut state = self.stage.lock();
        if let Some(at) = state.open.iter().position(|open| open.id == self.id) {
            state.lap_of_open(at, Instant::now(), came);
            state.open.remove(at);
        }
    }
}

impl Drop for OpenStage {
    fn drop(&mut self) {
        self.end(Came::ToAnEnd);
    }
}

/// Result of a step.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Came {
    ToAnEnd,
    ToNothing,
}

impl State {
    fn tried_since(&self, name: &str) -> Option<Instant> {
        self.stuck.iter().find(|(stuck, _)| stuck == name).map(|(_, since)| *since)
    }

    fn view_of(&self, name: Cow<'static, str>, until: Option<Instant>, now: Instant) -> StageView {
        StageView { since: self.tried_since(&name).unwrap_or(now), name, until }
    }

    fn get_stuck(&mut self, name: Cow<'static, str>, since: Instant) {
        self.stuck.retain(|(stuck, _)| *stuck != name);
        if self.stuck.len() >= self.most {
            self.stuck.remove(0);
        }
        self.stuck.push((name, since));
    }

    /// Ends the current step as successful: the next step of that name is a new wait.
    fn pass(&mut self, now: Instant) {
        if std::mem::replace(&mut self.untimed, true) {
            return;
        }
        let name = self.now.name.clone();
        self.stuck.retain(|(stuck, _)| *stuck != name);
        self.lap_of_now(now);
    }

    fn lap_of_now(&mut self, now: Instant) {
        let (name, took) = (self.now.name.clone(), now.saturating_duration_since(self.entered));
        self.lap(name, took);
    }

    fn lap_of_open(&mut self, at: usize, now: Instant, came: Came) {
        let Some(open) = self.open.get(at) else { return };
        let (StageView { name, since, .. }, entered) = (open.view.clone(), open.entered);
        match came {
            Came::ToAnEnd => self.stuck.retain(|(stuck, _)| *stuck != name),
            Came::ToNothing => self.get_stuck(name.clone(), since),
        }
        self.lap(name, now.saturating_duration_since(entered));
    }

    fn lap(&mut self, name: Cow<'static, str>, took: Duration) {
        let took = took.as_secs_f32();
        if let Some(known) = self.passed.iter_mut().find(|known| known.name == name) {
            known.times = known.times.saturating_add(1);
            (known.last, known.longest) = (took, known.longest.max(took));
        } else {
            // The timings of the start are worth more than later ones.
            self.passed.truncate(self.most - 1);
            // There are few, they are kept, and each pod has its own.
            self.passed.reserve_exact(1);
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
    async fn what_comes_to_nothing_is_waited_for_since_it_began() {
        let (stage, second, begun) = (Stage::new(), Duration::from_secs(1), Instant::now());
        for turn in 0..3 {
            stage.set("runtime status");
            assert_eq!(stage.view().since, Instant::now(), "{turn}: a look that works is new each time");
            stage.set("volumes");
            assert_eq!((&*stage.view().name, stage.view().since), ("volumes", begun), "{turn}");
            tokio::time::advance(second * 123).await;
            stage.failed("timed out");
            stage.rest("next try", Some(Instant::now() + second * 10));
            let since = begun + second * 123;
            assert_eq!((&*stage.view().name, stage.view().since), ("next try of volumes", since), "{turn}");
            tokio::time::advance(second * 10).await;
        }
        let volumes = stage.passed().into_iter().find(|lap| lap.name == "volumes").expect("a lap");
        assert_eq!((volumes.times, volumes.longest), (3, second * 123), "an attempt's time is its own");
        stage.set("volumes");
        stage.set("RunPodSandbox");
        stage.set("volumes");
        assert_eq!(stage.view().since, Instant::now(), "what worked is not waited for any more");
        stage.failed("no");
        stage.rest("idle", None);
        stage.set("volumes");
        stage.rest("back-off", Some(Instant::now() + second));
        assert_eq!(stage.view().name, "back-off", "all was well in between");
    }

    #[tokio::test(start_paused = true)]
    async fn of_what_is_done_side_by_side_the_oldest_is_shown() {
        let (stage, second, begun) = (Stage::new(), Duration::from_secs(1), Instant::now());
        stage.frame("containers");
        let a = stage.open("image a");
        tokio::time::advance(second).await;
        let b = stage.open("image b");
        assert_eq!((&*stage.view().name, stage.view().since), ("image a", begun));
        a.set_until("grace of a", Some(begun + second * 9));
        assert_eq!((&*stage.view().name, stage.view().until), ("image b", None));
        b.stuck();
        assert_eq!((&*stage.view().name, stage.view().until), ("grace of a", Some(begun + second * 9)));
        a.until(begun + second * 3);
        assert_eq!(stage.view().until, Some(begun + second * 3));
        drop(a);
        assert_eq!(stage.view().name, "containers");
        stage.rest("next try", Some(begun + second * 4));
        assert_eq!(stage.view().name, "next try of image b");
        tokio::time::advance(second).await;
        assert_eq!(stage.open("image b").stage.view().since, begun + second, "tried since then");
        let laps: Vec<_> = stage.passed().into_iter().map(|lap| (lap.name.into_owned(), lap.times)).collect();
        assert_eq!(laps, [("image a".to_owned(), 1), ("image b".to_owned(), 2), ("grace of a".to_owned(), 1)]);
        assert_eq!(Stage::of_containers(1000).lock().most, MOST_STAGES);
        assert_eq!(Stage::of_containers(10).lock().most, 78);
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
