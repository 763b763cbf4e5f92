//! logind inhibitor lock: delays the machine's shutdown and starts the drain of pods.
//!
//! Implements spec 05 §7.2.

use std::{io, os::fd::OwnedFd, path::PathBuf, sync::Arc, time::Duration};

use tokio::{
    task::spawn_blocking,
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::{
    drain::{Drain, DrainCause},
    ports::{LoginManager, LoginSession},
};
use berth_config::GoDuration;
use berth_sys::{
    atomic_file,
    backoff::Backoff,
    logind::{LogindError, ShutdownSignal},
};

/// Delay before reconnecting to a lost bus.
const AGAIN: Duration = Duration::from_secs(1);
/// Timeout for verifying a signal: the drain waits for it.
const CHECK: Duration = Duration::from_secs(1);
/// Number of checks whether logind has applied the longer delay, and the delay after the first one.
const DELAY_CHECKS: u32 = 5;
const FIRST_CHECK_DELAY: Duration = Duration::from_millis(100);
/// First and maximum retry delay for extending logind's delay.
const ROOM_AGAIN: Duration = Duration::from_secs(60);
const ROOM_AT_LEAST: Duration = Duration::from_secs(3600);
/// First line of the logind override file.
const MARK: &str = "# Kubelet logind override";
const MODE: u32 = 0o644;

/// Why shutdown signals are not received.
#[derive(Debug, thiserror::Error)]
enum InhibitorError {
    #[error(transparent)]
    Logind(#[from] LogindError),
    #[error("failed to write {path}: {cause}")]
    Override { path: String, cause: io::Error },
    #[error(
        "node shutdown manager was timed out after 5 attempts waiting for logind InhibitDelayMaxSec to update to \
         {wanted} (ShutdownGracePeriod), current value is {current}"
    )]
    TooShort { wanted: GoDuration, current: GoDuration },
}

/// logind override file that extends `InhibitDelayMaxSec`.
#[derive(Clone, Debug)]
pub struct LogindOverride(pub PathBuf);

impl Default for LogindOverride {
    fn default() -> Self {
        Self("/etc/systemd/logind.conf.d/99-kubelet.conf".into())
    }
}

impl LogindOverride {
    fn content(period: Duration) -> String {
        format!("{MARK}\n[Login]\nInhibitDelayMaxSec={}\n", period.as_secs_f64().ceil())
    }

    /// Writes the file unless its content is current.
    async fn write(&self, period: Duration) -> Result<(), InhibitorError> {
        let (path, content) = (self.0.clone(), Self::content(period));
        let write = move || {
            if std::fs::read_to_string(&path).is_ok_and(|now| now == content) {
                return Ok(());
            }
            if let Some(folder) = path.parent() {
                std::fs::create_dir_all(folder)?;
            }
            atomic_file::replace(&path, content.as_bytes(), MODE)
        };
        let written = spawn_blocking(write).await.map_err(io::Error::other).and_then(|written| written);
        written.map_err(|cause| InhibitorError::Override { path: self.0.display().to_string(), cause })
    }

    /// Removes the file if this agent wrote it: logind no longer needs to wait.
    pub async fn remove(self) {
        let remove = move || {
            let ours = std::fs::read_to_string(&self.0).is_ok_and(|content| content.starts_with(MARK));
            if ours { std::fs::remove_file(&self.0) } else { Ok(()) }
        };
        if let Ok(Err(error)) = spawn_blocking(remove).await {
            warn!(err = %error, "Failed to remove logind drop-in file");
        }
    }
}

/// Owner of the inhibitor lock; see the module documentation.
pub struct InhibitorLock {
    logind: Box<dyn LoginManager>,
    drain: Arc<Drain>,
    file: LogindOverride,
}

impl InhibitorLock {
    /// Creates the owner without connecting.
    pub fn new(logind: Box<dyn LoginManager>, drain: Arc<Drain>, file: LogindOverride) -> Self {
        Self { logind, drain, file }
    }

    /// Runs until stopped; reconnects whenever the bus is lost.
    pub async fn run(self, stop: CancellationToken) {
        // A lock outlives its bus connection: it is released once pods are terminated, or replaced.
        let (mut lock, mut last_error) = (None, String::new());
        while let Some(ended) = stop.run_until_cancelled(self.listen(&mut lock)).await {
            let text = ended.to_string();
            if text != last_error {
                warn!(err = %text, "Failed to watch for machine shutdown, retrying every second");
                last_error = text;
            }
            if stop.run_until_cancelled(sleep(AGAIN)).await.is_none() {
                return;
            }
        }
    }

    /// Runs while the bus is connected; returns why it is not.
    async fn listen(&self, lock: &mut Option<OwnedFd>) -> InhibitorError {
        match self.handle_signals(lock).await {
            Err(error) => error,
            Ok(never) => match never {},
        }
    }

    async fn handle_signals(&self, lock: &mut Option<OwnedFd>) -> Result<std::convert::Infallible, InhibitorError> {
        let (session, mut signals) = self.logind.connect().await?;
        // Handle a shutdown that was announced while the bus was disconnected.
        match session.is_preparing().await? {
            true => self.goes_down(lock).await,
            false => self.hold(&*session, lock).await?,
        }
        // Concurrently: a shutdown announced while the delay is extended must not be missed.
        let room = self.ensure_delay(&*session);
        tokio::pin!(room);
        let mut has_room = false;
        loop {
            let received = tokio::select! {
                biased;
                received = signals.next() => received?,
                () = &mut room, if !has_room => {
                    has_room = true;
                    continue;
                }
            };
            match received {
                ShutdownSignal::InProgress(true) => {
                    // Any bus client can send this signal: ignore it if logind itself denies it. If
                    // logind does not respond it may be shutting down.
                    if !matches!(timeout(CHECK, session.is_preparing()).await, Ok(Ok(false))) {
                        self.goes_down(lock).await;
                    }
                }
                ShutdownSignal::InProgress(false) => {
                    if !session.is_preparing().await? {
                        self.hold(&*session, lock).await?;
                    }
                }
                // A soft reboot ends processes like any other: processes that survive it do not matter
                // here.
                ShutdownSignal::Kind(how) => info!(how, "Received shutdown type from logind"),
            }
        }
    }

    /// Terminates pods first, then releases the lock.
    async fn goes_down(&self, lock: &mut Option<OwnedFd>) {
        self.drain.begin(DrainCause::Machine).await;
        *lock = None;
    }

    /// Acquires a lock; logind's delay is extended afterwards: a short delay is better than none.
    async fn hold(&self, session: &dyn LoginSession, lock: &mut Option<OwnedFd>) -> Result<(), InhibitorError> {
        self.stays().await;
        *lock = Some(session.inhibit().await?);
        info!(period = ?self.drain.total(), "Acquired inhibitor lock to delay machine shutdown");
        Ok(())
    }

    /// Ensures that logind waits as long as pods may take; retries failures, since the shutdown may be
    /// far in the future. logind reads the delay when the shutdown begins.
    async fn ensure_delay(&self, session: &dyn LoginSession) {
        let (mut backoff, mut last_error) = (Backoff::new(ROOM_AGAIN, ROOM_AT_LEAST), String::new());
        while let Err(error) = self.extend_delay(session).await {
            let text = error.to_string();
            if text != last_error {
                warn!(err = %text, "Failed to extend logind inhibitor delay, pods may get less time than configured at shutdown, retrying");
                last_error = text;
            }
            sleep(backoff.next_delay()).await;
        }
    }

    /// Cancels the machine's shutdown; other causes of the drain remain.
    async fn stays(&self) {
        if let Err(cause) = self.drain.cancel(DrainCause::Machine).await {
            debug!(?cause, "Machine shutdown was cancelled, drain continues for another cause");
        }
    }

    async fn extend_delay(&self, session: &dyn LoginSession) -> Result<(), InhibitorError> {
        let wanted = self.drain.total();
        if session.longest_delay().await? >= wanted {
            return Ok(());
        }
        self.file.write(wanted).await?;
        session.reload().await?;
        let (mut pause, mut current) = (FIRST_CHECK_DELAY, Duration::ZERO);
        for _ in 0..DELAY_CHECKS {
            current = session.longest_delay().await?;
            if current >= wanted {
                return Ok(());
            }
            sleep(pause).await;
            pause *= 2;
        }
        let seconds = |period: Duration| GoDuration::from_secs(i64::try_from(period.as_secs()).unwrap_or(i64::MAX));
        Err(InhibitorError::TooShort { wanted: seconds(wanted), current: seconds(current) })
    }
}

#[cfg(test)]
mod tests {
    use std::{
        collections::HashMap,
        io::Read,
        os::unix::net::UnixStream,
        sync::{Mutex as Shared, MutexGuard, PoisonError},
    };

    use async_trait::async_trait;
    use tokio::sync::mpsc;

    use super::*;
    use crate::shutdown::{
        fixture::{FakeNode, pod, world},
        ports::LoginSignals,
    };

    /// Fault of a call.
    #[derive(Clone, Copy, Debug)]
    enum Fault {
        Refused,
        Hangs,
    }

    /// A logind that outlives its bus, as the real one does.
    struct Fake {
        is_there: bool,
        is_preparing: bool,
        delay: Duration,
        delay_once_reloaded: Duration,
        /// Faults by the name of the call.
        faults: HashMap<&'static str, Fault>,
        session: Option<mpsc::UnboundedSender<ShutdownSignal>>,
        /// The other ends of the acquired locks.
        locks: Vec<UnixStream>,
    }

    #[derive(Clone)]
    struct Login(Arc<Shared<Fake>>);

    impl Login {
        fn new() -> Self {
            let delay = Duration::from_secs(600);
            Self(Arc::new(Shared::new(Fake {
                is_there: true,
                is_preparing: false,
                delay,
                delay_once_reloaded: delay,
                faults: HashMap::new(),
                session: None,
                locks: Vec::new(),
            })))
        }

        fn fake(&self) -> MutexGuard<'_, Fake> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner)
        }

        fn lose_bus(&self) {
            let mut fake = self.fake();
            (fake.is_there, fake.session) = (false, None);
        }

        fn send_in_progress(&self, begins: bool) {
            let sent = self.fake().session.as_ref().map(|session| session.send(ShutdownSignal::InProgress(begins)));
            sent.expect("a session").expect("the signal is received");
        }

        /// For each lock whether it is held.
        fn lock_states(&self) -> Vec<bool> {
            let is_locked = |mut lock: &UnixStream| matches!(lock.read(&mut [0; 1]), Err(error) if error.kind() == io::ErrorKind::WouldBlock);
            self.fake().locks.iter().map(is_locked).collect()
        }

        async fn call(&self, what: &'static str) -> Result<(), LogindError> {
            let (is_there, fault) = {
                let fake = self.fake();
                (fake.is_there, fake.faults.get(what).copied())
            };
            let failed = |cause: &str| LogindError::Call { what, cause: cause.to_owned() };
            match fault {
                _ if !is_there => Err(LogindError::Lost),
                None => Ok(()),
                Some(Fault::Refused) => Err(failed("no")),
                Some(Fault::Hangs) => {
                    sleep(Duration::from_secs(15)).await;
                    Err(failed("no answer"))
                }
            }
        }
    }

    struct Connection(Login);

    struct FakeSignals(mpsc::UnboundedReceiver<ShutdownSignal>);

    #[async_trait]
    impl LoginManager for Login {
        async fn connect(&self) -> Result<(Box<dyn LoginSession>, Box<dyn LoginSignals>), LogindError> {
            self.call("Connect").await?;
            let (session, receiver) = mpsc::unbounded_channel();
            self.fake().session = Some(session);
            Ok((Box::new(Connection(self.clone())), Box::new(FakeSignals(receiver))))
        }
    }

    #[async_trait]
    impl LoginSession for Connection {
        async fn longest_delay(&self) -> Result<Duration, LogindError> {
            self.0.call("InhibitDelayMaxUSec").await?;
            Ok(self.0.fake().delay)
        }

        async fn is_preparing(&self) -> Result<bool, LogindError> {
            self.0.call("PreparingForShutdown").await?;
            Ok(self.0.fake().is_preparing)
        }

        async fn inhibit(&self) -> Result<OwnedFd, LogindError> {
            self.0.call("Inhibit").await?;
            let (kept, given) = UnixStream::pair().expect("a pair");
            kept.set_nonblocking(true).expect("set");
            self.0.fake().locks.push(kept);
            Ok(given.into())
        }

        async fn reload(&self) -> Result<(), LogindError> {
            self.0.call("KillUnit").await?;
            let mut fake = self.0.fake();
            fake.delay = fake.delay_once_reloaded;
            Ok(())
        }
    }

    #[async_trait]
    impl LoginSignals for FakeSignals {
        async fn next(&mut self) -> Result<ShutdownSignal, LogindError> {
            self.0.recv().await.ok_or(LogindError::Lost)
        }
    }

    /// The owner of the lock with that logind, on a node with one pod that takes 5 s to terminate.
    async fn start_inhibitor(login: &Login) -> (Arc<FakeNode>, tempfile::TempDir) {
        let (world, drain) = world(vec![pod("a", 0, 5)], 0).await;
        let folder = tempfile::tempdir().expect("a folder");
        let file = LogindOverride(folder.path().join("logind.conf"));
        let inhibitor = InhibitorLock::new(Box::new(login.clone()), Arc::new(drain), file);
        tokio::spawn(inhibitor.run(CancellationToken::new()));
        sleep(Duration::from_millis(10)).await;
        (world, folder)
    }

    fn ends(world: &FakeNode) -> usize {
        world.log().iter().filter(|line| line.contains(" end a ")).count()
    }

    #[tokio::test(start_paused = true)]
    async fn a_lock_is_kept_while_there_is_no_bus_until_there_is_another() {
        let login = Login::new();
        let (world, _folder) = start_inhibitor(&login).await;
        assert_eq!(login.lock_states(), [true]);
        login.lose_bus();
        sleep(Duration::from_secs(60)).await;
        assert_eq!(login.lock_states(), [true], "logind waits for us all the same");
        login.fake().is_there = true;
        login.fake().faults.insert("Inhibit", Fault::Refused);
        sleep(Duration::from_secs(60)).await;
        assert_eq!(login.lock_states(), [true], "no other was granted");
        login.fake().faults.clear();
        sleep(Duration::from_secs(2)).await;
        assert_eq!(login.lock_states(), [false, true]);
        // A signal while the bus is disconnected.
        login.lose_bus();
        sleep(Duration::from_millis(2500)).await;
        login.fake().is_preparing = true;
        login.fake().is_there = true;
        sleep(Duration::from_secs(5)).await;
        assert_eq!((ends(&world), login.lock_states()), (1, vec![false, true]), "pods go, under the lock");
        sleep(Duration::from_secs(2)).await;
        assert_eq!(login.lock_states(), [false, false]);
    }

    #[tokio::test(start_paused = true)]
    async fn pods_go_before_the_lock_does_whoever_answers_then() {
        for fault in [None, Some(Fault::Refused), Some(Fault::Hangs)] {
            let login = Login::new();
            let (world, _folder) = start_inhibitor(&login).await;
            login.fake().is_preparing = true;
            login.fake().faults.extend(fault.map(|fault| ("PreparingForShutdown", fault)));
            login.send_in_progress(true);
            sleep(Duration::from_secs(1) + Duration::from_millis(10)).await;
            assert_eq!((ends(&world), login.lock_states()), (1, vec![true]), "{fault:?}");
            sleep(Duration::from_millis(3900)).await;
            assert_eq!(login.lock_states(), [true], "{fault:?}: the pod ends");
            sleep(Duration::from_millis(1200)).await;
            assert_eq!(login.lock_states(), [false], "{fault:?}: it has ended");
        }
        // The bus is lost right after its signal.
        let login = Login::new();
        let (world, _folder) = start_inhibitor(&login).await;
        login.send_in_progress(true);
        login.lose_bus();
        sleep(Duration::from_secs(4)).await;
        assert_eq!((ends(&world), login.lock_states()), (1, vec![true]));
        sleep(Duration::from_secs(2)).await;
        assert_eq!(login.lock_states(), [false]);
    }

    #[tokio::test(start_paused = true)]
    async fn what_logind_denies_is_not_believed() {
        let login = Login::new();
        let (world, _folder) = start_inhibitor(&login).await;
        login.send_in_progress(true);
        sleep(Duration::from_secs(60)).await;
        assert_eq!((ends(&world), login.lock_states()), (0, vec![true]));
    }

    #[tokio::test(start_paused = true)]
    async fn a_late_start_drains_and_takes_a_lock_once_the_shutdown_is_cancelled() {
        // AC-05-30
        let login = Login::new();
        login.fake().is_preparing = true;
        let (world, _folder) = start_inhibitor(&login).await;
        assert_eq!((ends(&world), login.lock_states()), (1, vec![]));
        sleep(Duration::from_secs(6)).await;
        login.fake().is_preparing = false;
        login.fake().faults.insert("Inhibit", Fault::Refused);
        login.send_in_progress(false);
        sleep(Duration::from_secs(10)).await;
        assert_eq!(login.lock_states(), [false; 0]);
        login.fake().faults.clear();
        sleep(Duration::from_secs(2)).await;
        assert_eq!(login.lock_states(), [true], "it asks until it has one");
    }

    #[tokio::test(start_paused = true)]
    async fn a_short_delay_is_better_than_none() {
        for (call, fault) in [
            ("KillUnit", Some(Fault::Refused)), // no systemd, or no permission
            ("KillUnit", Some(Fault::Hangs)),
            ("InhibitDelayMaxUSec", Some(Fault::Refused)),
            ("nothing", None), // the delay stays too short
        ] {
            let login = Login::new();
            let short = Duration::from_secs(5);
            (login.fake().delay, login.fake().delay_once_reloaded) = (short, short);
            login.fake().faults.extend(fault.map(|fault| (call, fault)));
            let (_world, folder) = start_inhibitor(&login).await;
            assert_eq!(login.lock_states(), [true], "{call} {fault:?}: at once");
            sleep(Duration::from_secs(20)).await;
            assert_eq!(login.lock_states(), [true], "{call} {fault:?}");
            let written = folder.path().join("logind.conf").exists();
            assert_eq!(written, call != "InhibitDelayMaxUSec", "{call} {fault:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn logind_is_asked_again_to_wait_longer() {
        for fault in [Fault::Refused, Fault::Hangs] {
            let login = Login::new();
            login.fake().delay = Duration::from_secs(5);
            login.fake().faults.insert("KillUnit", fault);
            let (_world, _folder) = start_inhibitor(&login).await;
            sleep(Duration::from_secs(40)).await;
            assert_eq!(login.fake().delay, Duration::from_secs(5), "{fault:?}");
            login.fake().faults.clear();
            sleep(Duration::from_secs(60)).await;
            assert_eq!(login.fake().delay, Duration::from_secs(600), "{fault:?}");
            assert_eq!(login.lock_states(), [true], "{fault:?}: it is the same lock");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_shutdown_is_handled_while_the_delay_is_extended() {
        let login = Login::new();
        login.fake().delay = Duration::from_secs(5);
        login.fake().faults.insert("KillUnit", Fault::Hangs);
        let (world, _folder) = start_inhibitor(&login).await;
        login.fake().is_preparing = true;
        login.send_in_progress(true);
        sleep(Duration::from_secs(1)).await;
        assert_eq!((ends(&world), login.lock_states()), (1, vec![true]));
    }
}
