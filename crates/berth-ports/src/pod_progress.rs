//! Progress of a pod worker: the current step, timings of completed steps, and recent errors.

use std::{
    borrow::Cow,
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

/// Maximum number of step timings and of failed steps stored per pod.
const MAX_STEPS: usize = 200;
/// Maximum number of errors stored per pod.
const MAX_ERRORS: usize = 5;
/// Maximum length of a stored error, characters.
const MAX_ERROR_LENGTH: usize = 1024;

/// What a pod waits for, and since when.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepView {
    /// E.g. `RunPodSandbox`, `image busybox:latest`, `grace period`.
    pub name: Cow<'static, str>,
    /// Start of the wait, including failed attempts before this one.
    pub since: Instant,
    /// Deadline at which the wait ends by itself, if known.
    pub until: Option<Instant>,
}

/// Timing of a completed step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepTiming {
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
pub struct SyncError {
    /// Error text, at most 1024 characters.
    pub text: String,
    /// Number of consecutive occurrences.
    pub times: u64,
    /// Time of the first occurrence.
    pub first: Instant,
    /// Time of the last occurrence.
    pub last: Instant,
}

/// Progress of a pod worker: written by the waiting code, read by `berth why` and the server.
/// Cheap to clone; the lock covers a copy only, never an await.
#[derive(Clone, Debug)]
pub struct PodProgress(Arc<Mutex<ProgressState>>);

#[derive(Debug)]
struct ProgressState {
    /// The worker's own sequential step.
    current: StepAttempt,
    /// Whether the current step is timed; a pause and a frame around concurrent steps are not.
    is_timed: bool,
    /// Concurrent steps by ID; the least recently changed first.
    concurrent: Vec<(u32, StepAttempt)>,
    next_id: u32,
    /// Reason and start of the last pause: a sync between two pauses for the same reason does not reset the start.
    last_pause: Option<(&'static str, Instant)>,
    /// Failed steps and when they were first attempted; the latest last.
    failed: Vec<(Cow<'static, str>, Instant)>,
    timings: Vec<StepTiming>,
    errors: VecDeque<SyncError>,
}

#[derive(Clone, Debug)]
struct StepAttempt {
    view: StepView,
    /// Start of this attempt; the wait may be older.
    started: Instant,
}

/// How a step ended; a failed step keeps the time of its first attempt.
#[derive(Clone, Copy, PartialEq, Eq)]
enum StepResult {
    Succeeded,
    Failed,
}

impl PodProgress {
    /// Progress of a new pod, in step `idle`.
    pub fn new() -> Self {
        let now = Instant::now();
        Self(Arc::new(Mutex::new(ProgressState {
            current: StepAttempt { view: StepView { name: "idle".into(), since: now, until: None }, started: now },
            is_timed: false,
            concurrent: Vec::new(),
            next_id: 0,
            last_pause: None,
            failed: Vec::new(),
            timings: Vec::new(),
            errors: VecDeque::new(),
        })))
    }

    /// Enters a step. If it failed the last time, the wait counts from its first attempt.
    pub fn enter(&self, name: impl Into<Cow<'static, str>>) {
        let mut state = self.lock();
        state.finish_current(StepResult::Succeeded);
        state.current = state.step(name.into(), None);
        state.is_timed = true;
    }

    /// Enters a frame around concurrent steps: shown while none of them runs, and not timed.
    pub fn enter_frame(&self, name: impl Into<Cow<'static, str>>) {
        self.enter(name);
        self.lock().is_timed = false;
    }

    /// Starts a concurrent step; [`PodProgress::view`] shows the least recently changed one.
    pub fn start_concurrent(&self, name: impl Into<Cow<'static, str>>) -> ConcurrentStep {
        let mut state = self.lock();
        let id = state.next_id;
        state.next_id = id.wrapping_add(1);
        let step = state.step(name.into(), None);
        state.concurrent.push((id, step));
        ConcurrentStep { progress: self.clone(), id }
    }

    /// Pauses between two syncs. A pause for the same reason as the last one keeps its start; one with a deadline after
    /// a failure names the failed step.
    pub fn pause(&self, reason: &'static str, until: Option<Instant>) {
        let now = Instant::now();
        let mut state = self.lock();
        state.finish_current(StepResult::Succeeded);
        let since = state.last_pause.filter(|(last, _)| *last == reason).map_or(now, |(_, since)| since);
        let mut name = Cow::Borrowed(reason);
        if until.is_none() {
            state.failed.clear();
        } else if let Some((failed, _)) = state.failed.last().filter(|(failed, _)| *failed != reason) {
            name = format!("{reason} of {failed}").into();
        }
        state.last_pause = Some((reason, since));
        state.current = StepAttempt { view: StepView { name, since, until }, started: now };
    }

    /// Records the error of a failed sync. The next attempt of the current step continues the same wait.
    pub fn fail(&self, error: &str) {
        let text: String = error.chars().take(MAX_ERROR_LENGTH).collect();
        let now = Instant::now();
        let mut state = self.lock();
        state.finish_current(StepResult::Failed);
        if let Some(last) = state.errors.back_mut().filter(|last| last.text == text) {
            (last.times, last.last) = (last.times.saturating_add(1), now);
            return;
        }
        if state.errors.len() == MAX_ERRORS {
            state.errors.pop_front();
        }
        state.errors.push_back(SyncError { text, times: 1, first: now, last: now });
    }

    /// Current step.
    pub fn view(&self) -> StepView {
        let state = self.lock();
        state.concurrent.first().map_or(&state.current, |(_, step)| step).view.clone()
    }

    /// Timings of completed steps, in the order of first completion.
    pub fn timings(&self) -> Vec<StepTiming> {
        self.lock().timings.clone()
    }

    /// Errors of failed syncs, the latest last.
    pub fn errors(&self) -> Vec<SyncError> {
        self.lock().errors.iter().cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, ProgressState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for PodProgress {
    fn default() -> Self {
        Self::new()
    }
}

/// A concurrent step; it succeeds when this is dropped.
#[derive(Debug)]
pub struct ConcurrentStep {
    progress: PodProgress,
    id: u32,
}

impl ConcurrentStep {
    /// Enters the next step; the same name continues the current step.
    pub fn enter(&self, name: impl Into<Cow<'static, str>>) {
        self.enter_until(name, None);
    }

    /// Enters the next step, which ends by itself at `until`.
    pub fn enter_until(&self, name: impl Into<Cow<'static, str>>, until: Option<Instant>) {
        let name = name.into();
        let mut state = self.progress.lock();
        if let Some(step) = state.step_mut(self.id).filter(|step| step.view.name == name) {
            step.view.until = until;
        } else if let Some(step) = state.remove(self.id) {
            state.finish(step, StepResult::Succeeded);
            let next = state.step(name, until);
            state.concurrent.push((self.id, next));
        }
    }

    /// Sets the deadline at which the step ends by itself.
    pub fn set_deadline(&self, until: Instant) {
        if let Some(step) = self.progress.lock().step_mut(self.id) {
            step.view.until = Some(until);
        }
    }

    /// Ends the step as failed: its next attempt continues the same wait.
    pub fn fail(self) {
        self.end(StepResult::Failed);
    }

    /// Ends the step and marks the operation it belongs to as failed, under the operation's name.
    pub fn fail_operation(self, name: impl Into<Cow<'static, str>>) {
        let (mut state, name) = (self.progress.lock(), name.into());
        if let Some(step) = state.remove(self.id) {
            let since = state.failed_since(&name).unwrap_or(step.started);
            state.finish(step, StepResult::Succeeded);
            state.add_failed(name, since);
        }
    }

    /// Clears the failure of the operation of that name.
    pub fn clear_failure(&self, name: &str) {
        self.progress.lock().remove_failed(name);
    }

    fn end(&self, result: StepResult) {
        let mut state = self.progress.lock();
        if let Some(step) = state.remove(self.id) {
            state.finish(step, result);
        }
    }
}

impl Drop for ConcurrentStep {
    fn drop(&mut self) {
        self.end(StepResult::Succeeded);
    }
}

impl ProgressState {
    fn step(&self, name: Cow<'static, str>, until: Option<Instant>) -> StepAttempt {
        let now = Instant::now();
        StepAttempt { view: StepView { since: self.failed_since(&name).unwrap_or(now), name, until }, started: now }
    }

    fn step_mut(&mut self, id: u32) -> Option<&mut StepAttempt> {
        self.concurrent.iter_mut().find(|(other, _)| *other == id).map(|(_, step)| step)
    }

    fn remove(&mut self, id: u32) -> Option<StepAttempt> {
        let at = self.concurrent.iter().position(|(other, _)| *other == id)?;
        Some(self.concurrent.remove(at).1)
    }

    fn finish_current(&mut self, result: StepResult) {
        if std::mem::take(&mut self.is_timed) {
            self.finish(self.current.clone(), result);
        }
    }

    /// Records result and timing of a step. After a success the next step of that name is a new wait.
    fn finish(&mut self, step: StepAttempt, result: StepResult) {
        let StepView { name, since, .. } = step.view;
        match result {
            StepResult::Succeeded => self.remove_failed(&name),
            StepResult::Failed => self.add_failed(name.clone(), since),
        }
        let took = step.started.elapsed();
        if let Some(known) = self.timings.iter_mut().find(|known| known.name == name) {
            known.times = known.times.saturating_add(1);
            (known.last, known.longest) = (took, known.longest.max(took));
        } else {
            // The timings of the start are worth more than later ones.
            self.timings.truncate(MAX_STEPS - 1);
            self.timings.push(StepTiming { name, times: 1, first: took, last: took, longest: took });
        }
    }

    fn failed_since(&self, name: &str) -> Option<Instant> {
        self.failed.iter().find(|(failed, _)| failed == name).map(|(_, since)| *since)
    }

    fn add_failed(&mut self, name: Cow<'static, str>, since: Instant) {
        self.remove_failed(&name);
        if self.failed.len() >= MAX_STEPS {
            self.failed.remove(0);
        }
        self.failed.push((name, since));
    }

    fn remove_failed(&mut self, name: &str) {
        self.failed.retain(|(failed, _)| failed != name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn stages_are_remembered_with_what_they_took() {
        let (progress, second) = (PodProgress::new(), Duration::from_secs(1));
        for seconds in [3, 5, 1] {
            progress.enter("volumes");
            tokio::time::advance(second * seconds).await;
            progress.enter(String::from("image a"));
            tokio::time::advance(second).await;
            progress.pause("idle", None);
            tokio::time::advance(second * 60).await;
        }
        let names: Vec<_> = progress.timings().into_iter().map(|s| (s.name.into_owned(), s.times)).collect();
        assert_eq!(names, [("volumes".to_owned(), 3), ("image a".to_owned(), 3)]);
        let volumes = progress.timings().remove(0);
        assert_eq!((volumes.first, volumes.last, volumes.longest), (second * 3, second, second * 5));
        for number in 0..300 {
            progress.enter(format!("container {number}"));
        }
        assert_eq!(progress.timings().len(), MAX_STEPS);
        assert_eq!(progress.timings()[0].name, "volumes", "the start is not forgotten");
    }

    #[tokio::test(start_paused = true)]
    async fn a_rest_for_the_same_goes_on() {
        let (progress, second, begun) = (PodProgress::new(), Duration::from_secs(1), Instant::now());
        for turn in 0..3 {
            progress.enter("runtime status");
            let until = Some(Instant::now() + second * 10);
            progress.pause("back-off", until);
            assert_eq!((progress.view().since, progress.view().until), (begun, until), "{turn}");
            tokio::time::advance(second * 10).await;
        }
        progress.enter("runtime status");
        assert_eq!(progress.view().since, begun + second * 30, "a turn is its own wait");
        progress.pause("idle", None);
        assert_eq!(progress.view().since, begun + second * 30);
    }

    #[tokio::test(start_paused = true)]
    async fn what_comes_to_nothing_is_waited_for_since_it_began() {
        let (progress, second, begun) = (PodProgress::new(), Duration::from_secs(1), Instant::now());
        for turn in 0..3 {
            progress.enter("runtime status");
            assert_eq!(progress.view().since, Instant::now(), "{turn}: a look that works is new each time");
            progress.enter("volumes");
            assert_eq!((&*progress.view().name, progress.view().since), ("volumes", begun), "{turn}");
            tokio::time::advance(second * 123).await;
            progress.fail("timed out");
            progress.pause("retry", Some(Instant::now() + second * 10));
            let since = begun + second * 123;
            assert_eq!((&*progress.view().name, progress.view().since), ("retry of volumes", since), "{turn}");
            tokio::time::advance(second * 10).await;
        }
        let volumes = progress.timings().into_iter().find(|lap| lap.name == "volumes").expect("a lap");
        assert_eq!((volumes.times, volumes.longest), (3, second * 123), "an attempt's time is its own");
        progress.enter("volumes");
        progress.enter("RunPodSandbox");
        progress.enter("volumes");
        assert_eq!(progress.view().since, Instant::now(), "what worked is not waited for any more");
        progress.fail("no");
        progress.pause("idle", None);
        progress.enter("volumes");
        progress.pause("back-off", Some(Instant::now() + second));
        assert_eq!(progress.view().name, "back-off", "all was well in between");
    }

    #[tokio::test(start_paused = true)]
    async fn of_what_is_done_side_by_side_the_oldest_is_shown() {
        let (progress, second, begun) = (PodProgress::new(), Duration::from_secs(1), Instant::now());
        progress.enter_frame("containers");
        let a = progress.start_concurrent("image a");
        tokio::time::advance(second).await;
        let b = progress.start_concurrent("image b");
        assert_eq!((&*progress.view().name, progress.view().since), ("image a", begun));
        a.enter_until("grace of a", Some(begun + second * 9));
        assert_eq!((&*progress.view().name, progress.view().until), ("image b", None));
        b.fail();
        assert_eq!((&*progress.view().name, progress.view().until), ("grace of a", Some(begun + second * 9)));
        a.set_deadline(begun + second * 3);
        assert_eq!(progress.view().until, Some(begun + second * 3));
        drop(a);
        assert_eq!(progress.view().name, "containers");
        progress.pause("retry", Some(begun + second * 4));
        assert_eq!(progress.view().name, "retry of image b");
        tokio::time::advance(second).await;
        assert_eq!(progress.start_concurrent("image b").progress.view().since, begun + second, "tried since then");
        let laps: Vec<_> = progress.timings().into_iter().map(|lap| (lap.name.into_owned(), lap.times)).collect();
        assert_eq!(laps, [("image a".to_owned(), 1), ("image b".to_owned(), 2), ("grace of a".to_owned(), 1)]);
    }

    #[tokio::test(start_paused = true)]
    async fn errors_are_counted_and_bounded() {
        let progress = PodProgress::new();
        for text in ["a", "a", "b"] {
            progress.fail(text);
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        let errors: Vec<_> = progress.errors().into_iter().map(|e| (e.text, e.times)).collect();
        assert_eq!(errors, [("a".to_owned(), 2), ("b".to_owned(), 1)]);
        for number in 0..10 {
            progress.fail(&format!("{number}{}", "x".repeat(10_000)));
        }
        assert_eq!(progress.errors().len(), MAX_ERRORS);
        assert!(progress.errors().iter().all(|error| error.text.chars().count() == MAX_ERROR_LENGTH));
    }
}
