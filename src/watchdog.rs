//! Notifies systemd (sd_notify) of readiness, and of liveness for its watchdog (spec 01 §8.2).
//!
//! The first watchdog notification precedes everything else. Until the checks are installed every notification is sent,
//! so that a slow start does not get the agent killed. Notifications are sent from the async runtime that runs all
//! other tasks: if that runtime hangs there are none, as intended.

use std::{
    ffi::OsStr,
    io,
    os::{
        linux::net::SocketAddrExt,
        unix::{
            ffi::OsStrExt,
            net::{SocketAddr, UnixDatagram},
        },
    },
    sync::{Arc, OnceLock},
    time::Duration,
};

use rand::Rng;
use tokio::time::{MissedTickBehavior, interval, sleep};
use tokio_util::sync::CancellationToken;
use tracing::{error, warn};

use berth_server::ports::Health;

/// Delay before the only retry of a notification, plus up to 10 % jitter.
const AGAIN: Duration = Duration::from_secs(1);

/// Checks that must pass for a watchdog notification; none until they are set.
pub type Checks = Arc<OnceLock<Arc<dyn Health>>>;

/// Receiver of state notifications. Never blocks.
pub trait StateNotifier: Send + Sync + 'static {
    /// Sends a state notification, for example `READY=1`.
    ///
    /// # Errors
    /// The notification cannot be sent, now or ever.
    fn notify(&self, state: &str) -> io::Result<()>;
}

/// Notification socket of systemd or a compatible service manager.
#[derive(Debug)]
pub struct ServiceManager(UnixDatagram);

impl ServiceManager {
    /// Connects to the socket in `NOTIFY_SOCKET`; `None` if the variable is unset or empty.
    ///
    /// # Errors
    /// The variable does not name an existing socket.
    pub fn of_environment() -> io::Result<Option<Self>> {
        let name = std::env::var_os("NOTIFY_SOCKET").filter(|name| !name.is_empty());
        name.map(|name| Self::at(&name)).transpose()
    }

    /// Connects to a socket path; a leading `@` means the abstract namespace.
    fn at(name: &OsStr) -> io::Result<Self> {
        let address = match name.as_bytes().strip_prefix(b"@") {
            Some(name) => SocketAddr::from_abstract_name(name)?,
            None => SocketAddr::from_pathname(name)?,
        };
        let socket = UnixDatagram::unbound()?;
        socket.connect_addr(&address)?;
        socket.set_nonblocking(true)?;
        Ok(Self(socket))
    }
}

impl StateNotifier for ServiceManager {
    fn notify(&self, state: &str) -> io::Result<()> {
        self.0.send(state.as_bytes()).map(drop)
    }
}

/// Sends a watchdog notification every half of `timeout`, as long as all checks pass, until `stop`.
pub async fn run_watchdog(
    listener: Arc<dyn StateNotifier>,
    timeout: Duration,
    checks: Checks,
    stop: CancellationToken,
) {
    let mut ticks = interval(timeout / 2);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            _ = ticks.tick() => {}
        }
        match failing(&checks) {
            None => notify_with_retry(&*listener, "WATCHDOG=1").await,
            Some((check, reason)) => {
                error!(check, reason, "Do not notify watchdog this iteration as the kubelet is reportedly not healthy")
            }
        }
    }
}

/// Name and reason of the first check that fails.
fn failing(checks: &Checks) -> Option<(&'static str, String)> {
    let checks = checks.get()?;
    checks.names().iter().find_map(|name| Some((*name, checks.check(name)?)))
}

/// Sends a notification and retries once if that fails.
pub async fn notify_with_retry(listener: &dyn StateNotifier, state: &str) {
    let Err(error) = listener.notify(state) else { return };
    warn!(err = %error, state, "Failed to notify systemd, retrying once");
    let pause = AGAIN.mul_f64(1.0 + rand::rng().random_range(0.0..0.1));
    sleep(pause).await;
    if let Err(error) = listener.notify(state) {
        error!(err = %error, state, "Failed to notify systemd");
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use tokio::{sync::watch, time::Instant};

    use super::*;
    use crate::{
        engine::SyncLoopLiveness,
        logging::{self, OutputStreams},
        serving::{
            pages::{AgentHealth, HealthDeps},
            task_liveness::TaskLivenessRegistry,
        },
    };
    use berth_config::defaults::defaults;
    use berth_metrics::SliMetrics;

    #[derive(Default)]
    struct FakeServiceManager {
        notifications: Mutex<Vec<Duration>>,
        failures: Mutex<u32>,
        start: OnceLock<Instant>,
    }

    impl StateNotifier for FakeServiceManager {
        fn notify(&self, state: &str) -> io::Result<()> {
            assert_eq!(state, "WATCHDOG=1");
            let mut failures = self.failures.lock().expect("lock");
            if *failures > 0 {
                *failures -= 1;
                return Err(io::ErrorKind::WouldBlock.into());
            }
            let since = self.start.get_or_init(Instant::now).elapsed();
            self.notifications.lock().expect("lock").push(since);
            Ok(())
        }
    }

    impl FakeServiceManager {
        fn seconds(&self) -> Vec<u64> {
            self.notifications.lock().expect("lock").iter().map(Duration::as_secs).collect()
        }
    }

    struct Sick(Mutex<bool>);

    impl Health for Sick {
        fn names(&self) -> &[&'static str] {
            &["log", "syncloop"]
        }
        fn check(&self, name: &str) -> Option<String> {
            (name == "syncloop" && *self.0.lock().expect("lock")).then(|| "too long".to_owned())
        }
    }

    /// Runs the watchdog for that time; returns when notifications arrived, in seconds.
    async fn notification_times(ear: Arc<FakeServiceManager>, checks: Checks, time: Duration) -> Vec<u64> {
        let stop = CancellationToken::new();
        let beating = tokio::spawn(run_watchdog(ear.clone(), Duration::from_secs(20), checks, stop.clone()));
        sleep(time).await;
        stop.cancel();
        beating.await.expect("ends");
        ear.seconds()
    }

    #[tokio::test(start_paused = true)]
    async fn beats_come_twice_per_timeout_from_the_start() {
        // AC-01-29
        let times = notification_times(Arc::default(), Checks::default(), Duration::from_secs(35)).await;
        assert_eq!(times, [0, 10, 20, 30]);
    }

    #[tokio::test(start_paused = true)]
    async fn no_notification_is_sent_while_a_check_fails() {
        let (checks, sick) = (Checks::default(), Arc::new(Sick(Mutex::new(true))));
        assert!(checks.set(sick.clone()).is_ok());
        assert!(notification_times(Arc::default(), checks.clone(), Duration::from_secs(35)).await.is_empty());
        *sick.0.lock().expect("lock") = false;
        assert_eq!(notification_times(Arc::default(), checks, Duration::from_secs(15)).await, [0, 10]);
    }

    /// Sync loop that hangs: `/healthz` reports it, and no notification is sent until it runs again (spec 05 §11).
    #[tokio::test(start_paused = true)]
    async fn a_stuck_sync_loop_fails_healthz_and_stops_notifications() {
        let heartbeat = SyncLoopLiveness::new();
        let (block, mut blocked) = watch::channel(false);
        let turning = heartbeat.clone();
        tokio::spawn(async move {
            while blocked.wait_for(|is_blocked| !is_blocked).await.is_ok() {
                turning.record_iteration();
                sleep(Duration::from_secs(2)).await;
            }
        });
        let (_, log) = logging::subscriber(&defaults().logging, OutputStreams::single(Box::new(io::sink())));
        let health: Arc<dyn Health> = Arc::new(AgentHealth::new(HealthDeps {
            heartbeat,
            sync_frequency: Duration::from_secs(60),
            log,
            liveness: TaskLivenessRegistry::default(),
            device_plugins: watch::channel(None).1,
            slis: SliMetrics::new(0.0),
        }));
        let checks = Checks::default();
        assert!(checks.set(health.clone()).is_ok());
        let (ear, stop) = (Arc::<FakeServiceManager>::default(), CancellationToken::new());
        tokio::spawn(run_watchdog(ear.clone(), Duration::from_secs(20), checks, stop.child_token()));
        let minute = Duration::from_secs(60);
        let beats = async |minutes: u32| {
            ear.notifications.lock().expect("lock").clear();
            sleep(minute * minutes).await;
            (ear.notifications.lock().expect("lock").len(), health.check("syncloop"))
        };
        let stuck = Some("sync Loop took longer than expected".to_owned());
        assert_eq!(beats(2).await.1, None);
        block.send_replace(true);
        let (count, failed) = beats(4).await;
        assert!(count > 20 && failed.is_none(), "a long turn is no end: {count} {failed:?}");
        assert_eq!(beats(2).await.1, stuck);
        assert_eq!(beats(2).await, (0, stuck), "without notifications the service manager ends the agent");
        block.send_replace(false);
        let (count, failed) = beats(1).await;
        assert!(count > 3 && failed.is_none(), "{count} {failed:?}");
        drop(stop);
    }

    /// A long-running task that hangs is named in the check, and systemd restarts the agent (spec 05 §11).
    #[tokio::test(start_paused = true)]
    async fn a_stuck_task_is_named_and_stops_notifications() {
        let (_, log) = logging::subscriber(&defaults().logging, OutputStreams::single(Box::new(io::sink())));
        let liveness = TaskLivenessRegistry::default();
        let (probes, lease) = (liveness.of("probes"), liveness.of("lease"));
        let slis = SliMetrics::new(0.0);
        let (heartbeat, sync_frequency) = (SyncLoopLiveness::new(), Duration::from_secs(3600));
        let health = Arc::new(AgentHealth::new(HealthDeps {
            heartbeat,
            sync_frequency,
            log,
            liveness,
            device_plugins: watch::channel(None).1,
            slis,
        }));
        assert_eq!(health.names(), ["log", "syncloop", "device-plugin", "probes", "lease"]);
        let checks = Checks::default();
        assert!(checks.set(health.clone()).is_ok());
        lease.report_progress();
        probes.report_progress();
        probes.mark_idle();
        sleep(Duration::from_secs(290)).await;
        assert_eq!(failing(&checks), None);
        sleep(Duration::from_secs(20)).await;
        let (name, why) = failing(&checks).expect("the lease hangs");
        assert_eq!((name, why.as_str()), ("lease", "no heartbeat for 310 s"));
        assert_eq!((health.check("probes"), health.check("nobody")), (None, None));
        lease.report_progress();
        assert_eq!(failing(&checks), None, "it goes on");
    }

    #[tokio::test(start_paused = true)]
    async fn a_failed_notification_is_retried_once() {
        let once = Arc::new(FakeServiceManager { failures: Mutex::new(1), ..FakeServiceManager::default() });
        let begin = Instant::now();
        assert!(once.start.set(begin).is_ok());
        assert_eq!(notification_times(once, Checks::default(), Duration::from_secs(5)).await, [1]);
        let twice = Arc::new(FakeServiceManager { failures: Mutex::new(2), ..FakeServiceManager::default() });
        assert!(twice.start.set(Instant::now()).is_ok());
        assert_eq!(notification_times(twice, Checks::default(), Duration::from_secs(15)).await, [10]);
    }

    #[test]
    fn a_service_manager_is_found_by_path_and_by_abstract_name() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("notify");
        let named = format!("berth-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&named).expect("a name");
        let ears = [
            (UnixDatagram::bind(&path).expect("a socket"), path.into_os_string()),
            (UnixDatagram::bind_addr(&address).expect("a socket"), format!("@{named}").into()),
        ];
        for (ear, name) in ears {
            ServiceManager::at(&name).expect("there").notify("READY=1").expect("received");
            let mut buffer = [0; 16];
            let length = ear.recv(&mut buffer).expect("a datagram");
            assert_eq!(buffer.get(..length), Some(b"READY=1".as_slice()));
        }
        ServiceManager::at(OsStr::new("/nowhere/at/all")).expect_err("nobody there");
    }
}
