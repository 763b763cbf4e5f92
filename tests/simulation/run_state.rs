//! State of one run: the machine, the agent on it, and the desired pods of its sources.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use berth_ports::Clock;
use berth_types::{Pod, PodSource, PodUid, api};
use rand::{Rng, SeedableRng, rngs::SmallRng};
use tokio::time::{Instant, sleep};

use crate::{
    RunResult, convergence_check, invariants,
    profile::{FaultKind, Profile},
    script,
    time_limit::{LAST_CRASH, LONGEST_BACKOFF, TimeLimit},
    trace::Trace,
};
use berth_testkit::agent::{Agent, Machine, Setup};

/// Interval at which the API server receives status updates.
const SERVED: Duration = Duration::from_millis(250);

/// State of a run.
pub struct RunState {
    /// Everything that outlives the agent.
    pub machine: Machine,
    /// The agent; `None` while it is down.
    pub agent: Option<Agent>,
    /// Random numbers of the script.
    pub chance: SmallRng,
    /// Fault profile of the seed.
    pub profile: Profile,
    /// Pods of the file source, by name.
    pub files: BTreeMap<String, Arc<Pod>>,
    /// Pods of the API server, by UID.
    pub api: BTreeMap<PodUid, Arc<Pod>>,
    /// Sources that have sent their pods to this agent.
    pub synced_sources: BTreeSet<PodSource>,
    /// Pods that were desired, removed, and desired again.
    pub returned: BTreeSet<PodUid>,
    /// Name of the pod whose calls never return.
    pub victim: Option<String>,
    /// Delays caused by the script.
    pub accounts: TimeLimit,
    /// Trace of the run.
    pub trace: Trace,
    /// Number of the next new pod.
    pub next: u32,
    /// Published restart counts.
    pub restarts: BTreeMap<(PodUid, String), i32>,
    finished: BTreeSet<PodUid>,
}

impl RunState {
    /// Runs a seed.
    pub async fn live(seed: u64) -> Result<RunResult, String> {
        let mut world = Self::new(seed).await;
        let lived = world.lived().await;
        lived.map_err(|error| {
            let granted = world.accounts.granted(&world.profile);
            let story = world.trace.all(&world.machine.cri);
            format!("{error}\n{:?}, granted {granted:?}\n{story}", world.profile)
        })
    }

    async fn new(seed: u64) -> Self {
        let mut chance = SmallRng::seed_from_u64(seed);
        let profile = Profile::draw(&mut chance);
        let setup =
            Setup { backoff: (Duration::from_secs(1), LONGEST_BACKOFF), reads_logins: true, ..Setup::default() };
        let machine = Machine::with(setup);
        machine.cri.seed(seed);
        let agent = Some(machine.start().await);
        Self {
            machine,
            agent,
            chance,
            profile,
            files: BTreeMap::new(),
            api: BTreeMap::new(),
            synced_sources: BTreeSet::new(),
            returned: BTreeSet::new(),
            victim: None,
            accounts: TimeLimit::default(),
            trace: Trace::new(),
            next: 0,
            restarts: BTreeMap::new(),
            finished: BTreeSet::new(),
        }
    }

    async fn lived(&mut self) -> Result<RunResult, String> {
        script::play(self).await?;
        let settled_in = self.heal().await?;
        invariants::check(&self.machine.cri, self)?;
        let fingerprint = self.trace.fingerprint(&self.machine.cri);
        if let Some(agent) = self.agent.take() {
            agent.stop(Duration::from_secs(1)).await;
        }
        Ok(RunResult { fingerprint, settled_in, granted: self.accounts.granted(&self.profile) })
    }

    /// Ends all faults, and waits for the desired state.
    async fn heal(&mut self) -> Result<Duration, String> {
        if let Some(agent) = &self.agent {
            agent.set_kill_point(None);
        }
        script::last_behaviours(self);
        self.machine.cri.set_conditions(true, true);
        self.machine.clear_disk_faults();
        let late = [FaultKind::Hangs, FaultKind::Delays].iter().any(|t| self.profile.has(*t));
        if let Some(victim) = self.victim.clone() {
            self.accounts.deadlines = late;
            self.note(format!("heal all but {victim}"));
            self.machine.cri.heal_except(&victim);
            self.up().await;
            self.settle(Some(&victim)).await.map_err(|e| format!("while {victim} hangs: {e}"))?;
        }
        self.note("heal".to_owned());
        self.machine.cri.heal();
        let hangs = late || self.victim.is_some();
        self.accounts.deadlines = false;
        if hangs && self.chance.random_bool(0.7) {
            self.machine.cri.restart();
        } else {
            self.accounts.deadlines = hangs;
        }
        self.up().await;
        let taken = self.settle(None).await?;
        // Calls of a stopped agent are still in progress: containers may yet exit.
        let stops = if self.profile.has(FaultKind::Stubborn) { self.accounts.grace } else { Duration::ZERO };
        self.wait(LAST_CRASH.max(stops) + Duration::from_secs(1)).await?;
        self.settle(None).await.map_err(|e| format!("after it had settled: {e}"))?;
        self.quiet().await?;
        Ok(taken)
    }

    /// Waits for the desired state within the time limit.
    async fn settle(&mut self, except: Option<&str>) -> Result<Duration, String> {
        let (begun, granted) = (Instant::now(), self.accounts.granted(&self.profile));
        let mut pause = Duration::from_millis(20);
        loop {
            self.serve().await?;
            let Err(lacking) = convergence_check::settled(self, except).await else { return Ok(begun.elapsed()) };
            if begun.elapsed() >= granted {
                return Err(format!("not settled within {granted:?}: {lacking}"));
            }
            sleep(pause).await;
            pause = (pause * 5 / 4).min(Duration::from_secs(2));
        }
    }

    /// Asserts that settled pods cause no mutating calls.
    async fn quiet(&mut self) -> Result<(), String> {
        let before = self.machine.cri.calls().len();
        self.wait(Duration::from_secs(5)).await?;
        let acts = ["run_podsandbox", "create_container", "start_container", "stop_container"];
        match self.machine.cri.calls().iter().skip(before).find(|call| acts.contains(&call.op)) {
            Some(call) => Err(format!("not quiet: {} {}", call.op, call.target)),
            None => convergence_check::settled(self, None).await.map_err(|e| format!("does not stay settled: {e}")),
        }
    }

    /// Records a step of the script.
    pub fn note(&mut self, line: String) {
        self.trace.note(line);
    }

    /// Advances time while the API server keeps working.
    pub async fn wait(&mut self, time: Duration) -> Result<(), String> {
        let end = Instant::now() + time;
        loop {
            self.serve().await?;
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            sleep(left.min(SERVED)).await;
        }
    }

    /// Starts the agent if it is down, and lets its sources sync.
    pub async fn up(&mut self) {
        self.find_dead().await;
        if self.agent.is_none() {
            self.agent = Some(self.machine.start().await);
            self.synced_sources.clear();
            self.note("agent started".to_owned());
        }
        for source in [PodSource::File, PodSource::Api] {
            if !self.synced_sources.contains(&source) {
                self.hand_in(source).await;
            }
        }
    }

    /// Detects an agent that was killed at one of its calls.
    async fn find_dead(&mut self) {
        if self.agent.as_ref().is_some_and(Agent::is_dead) {
            self.down(true).await;
        }
    }

    /// Kills or stops the agent.
    pub async fn down(&mut self, killed: bool) {
        let Some(agent) = self.agent.take() else { return };
        self.synced_sources.clear();
        if killed {
            self.note("agent killed".to_owned());
            agent.kill();
        } else {
            self.note("agent stopped".to_owned());
            agent.stop(Duration::from_secs(1)).await;
        }
    }

    /// Sends the pods of a source to the agent.
    pub async fn hand_in(&mut self, source: PodSource) {
        let Some(agent) = &self.agent else { return };
        self.synced_sources.insert(source);
        match source {
            PodSource::Api => agent.api(self.api.values()).await,
            _ => agent.files(self.files.values()).await,
        }
    }

    /// Sends a source's changes, if it has sent its pods before.
    pub async fn changed(&mut self, source: PodSource) {
        if self.synced_sources.contains(&source) {
            self.hand_in(source).await;
        }
    }

    /// All desired pods.
    pub fn wanted(&self) -> impl Iterator<Item = &Arc<Pod>> {
        self.files.values().chain(self.api.values())
    }

    /// Processes status updates in the API server, and deletes finished pods.
    async fn serve(&mut self) -> Result<(), String> {
        self.find_dead().await;
        let Some(agent) = &self.agent else { return Ok(()) };
        invariants::restart_counts(&agent.status.snapshot(), &self.returned, &mut self.restarts)?;
        let mut changed = false;
        for word in agent.status.unsent() {
            agent.status.mark_sent(&word.pod.uid, word.version, self.machine.clock.now());
            let Some(known) = self.api.get(&word.pod.uid) else { continue };
            let object = with_status(known, &word.status);
            self.api.insert(word.pod.uid.clone(), object);
            changed = true;
            if word.finished {
                self.finished.insert(word.pod.uid);
            }
        }
        let done = |uid: &PodUid, pod: &Pod| pod.is_deleting() && self.finished.contains(uid);
        let gone: Vec<PodUid> =
            self.api.iter().filter(|(uid, pod)| done(uid, pod)).map(|(uid, _)| uid.clone()).collect();
        for uid in gone {
            self.api.remove(&uid);
            self.trace.note(format!("the API server deletes {uid}"));
            changed = true;
        }
        if changed {
            self.changed(PodSource::Api).await;
        }
        Ok(())
    }
}

fn with_status(pod: &Pod, status: &api::PodStatus) -> Arc<Pod> {
    let mut object = pod.to_object();
    object.status = Some(status.clone());
    Arc::new(Pod::new(object).expect("complete"))
}
