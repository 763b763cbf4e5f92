//! The name of what a pod is waiting for, so that every wait can be shown; and what it waited for before.

use std::{
    borrow::Cow,
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

/// Stages a pod of one container or two remembers; those of its start are the first.
const STAGES: usize = 24;
/// Stages a start has: the pod's own, and those of each container.
const OF_POD: usize = 8;
const OF_CONTAINER: usize = 7;
/// Stages any pod remembers.
const MOST_STAGES: usize = 200;
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
    /// What the worker itself does, one thing after the other.
    now: StageView,
    /// When this attempt began; the wait may be older.
    entered: Instant,
    /// Whether that is nothing whose time is told: a rest, or a frame around others.
    untimed: bool,
    /// What is done side by side, each by its own task; the oldest first.
    open: Vec<Open>,
    next_open: u32,
    /// What was last rested for, and since when: a turn between two rests for the same ends none.
    rest: Option<(&'static str, Instant)>,
    /// What came to nothing, and since when it is tried; the latest last.
    stuck: Vec<(Cow<'static, str>, Instant)>,
    most: usize,
    passed: Vec<Lap>,
    errors: VecDeque<StageError>,
}

/// One of several things done at the same time.
#[derive(Debug)]
struct Open {
    id: u32,
    view: StageView,
    /// When this attempt began; the wait may be older.
    entered: Instant,
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

/// Something done beside other things: a stage of its own until this is dropped.
#[derive(Debug)]
pub struct OpenStage {
    stage: Stage,
    id: u32,
}

impl Stage {
    /// Starts as `idle`.
    pub fn new() -> Self {
        Self::of_containers(1)
    }

    /// The same for a pod of so many containers: each has stages of its own that are worth remembering.
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

    /// Enters a stage. One that came to nothing the last time has been waited for since then.
    pub fn set(&self, name: impl Into<Cow<'static, str>>) {
        self.enter(name.into(), false);
    }

    /// Enters what is a frame around stages of others: shown where none of those is under way, and no phase of its own.
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

    /// Begins something beside what else is done; the oldest of such stages is the one that is shown.
    pub fn open(&self, name: impl Into<Cow<'static, str>>) -> OpenStage {
        let now = Instant::now();
        let mut state = self.lock();
        let id = state.next_open;
        state.next_open = id.wrapping_add(1);
        let view = state.view_of(name.into(), None, now);
        state.open.push(Open { id, view, entered: now });
        OpenStage { stage: self.clone(), id }
    }

    /// Rests between two turns. A rest for the same as the last one goes on; one after an error names what came to
    /// nothing.
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

    /// Remembers why a turn failed, and that what is done now came to nothing.
    pub fn failed(&self, text: &str) {
        self.stuck();
        self.note(text);
    }

    /// What is done now came to nothing: the next time it is waited for since it was first begun.
    pub fn stuck(&self) {
        let mut state = self.lock();
        if !state.untimed {
            let StageView { name, since, .. } = state.now.clone();
            state.get_stuck(name, since);
            // Its time is told all the same.
            let now = Instant::now();
            state.lap_of_now(now);
            state.untimed = true;
        }
    }

    /// Remembers why a turn failed.
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

    /// The current stage.
    pub fn view(&self) -> StageView {
        let state = self.lock();
        state.open.first().map_or(&state.now, |oldest| &oldest.view).clone()
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

impl OpenStage {
    /// Goes on to what comes next; with what it does already where that is called the same.
    pub fn set(&self, name: impl Into<Cow<'static, str>>) {
        self.set_until(name, None);
    }

    /// Goes on to what ends by itself at that moment.
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
        // Those that have gone on least stand first.
        state.open.remove(at);
        state.open.push(Open { id: self.id, view, entered: now });
    }

    /// It ends by itself at that moment.
    pub fn until(&self, until: Instant) {
        let mut state = self.stage.lock();
        if let Some(open) = state.open.iter_mut().find(|open| open.id == self.id) {
            open.view.until = Some(until);
        }
    }

    /// It came to nothing: the next time it is waited for since it was first begun.
    pub fn stuck(self) {
        self.end(Came::ToNothing);
    }

    /// What it is a step of came to nothing, and is known by that name.
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

    /// What is called that is there, however it came.
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

/// How a stage ended.
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

    /// The current stage is over, and well: what it is called may be waited for anew.
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
            // How it started is worth more than what came long after.
            self.passed.truncate(self.most - 1);
            // There are few, they stay, and each pod has its own.
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
