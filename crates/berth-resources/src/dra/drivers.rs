//! Registry of DRA drivers, and the tasks that keep their connections and health streams. Spec 06c §3.1, §3.6.
//!
//! ```text
//!  plugin watcher ──register──► DriverTable ◄─client, disconnect─ one task per endpoint ◄─► driver
//!                                    │                                    └─► on_health
//!                                    └─► one task for all drivers ─► on_gone
//! ```
//!
//! The table is behind one mutex that is never held across an await.

use std::{
    collections::BTreeMap,
    future::pending,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use tokio::{
    sync::Notify,
    time::{Instant, sleep, sleep_until},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::Code;
use tracing::{debug, info, warn};

use super::{
    driver_client::{DriverClient, DriverEndpoint, choose_service},
    driver_table::{DriverTable, Link, RegistrationId},
    health::DeviceReport,
};
use berth_cri::plugin_socket::{RpcError, TEXT};
use berth_metrics::DraMetrics;
use berth_ports::{PluginHandler, PluginInfo};
use berth_sys::backoff::Backoff;
use berth_types::{cut_at_char, fieldpath::quoted, names};

/// Delays between connection attempts. The first attempt after a lasting connection is made at once.
const RECONNECT: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(2));
/// How long a connection lasts at least until the delays start again at their base.
const LASTING: Duration = Duration::from_secs(5);
/// Delay after the end of a health stream.
const REOPEN_HEALTH: Duration = Duration::from_secs(5);
/// Minimum interval between two health messages of an endpoint that are processed: a driver that floods the agent with
/// messages is slowed down by flow control.
const HEALTH_INTERVAL: Duration = Duration::from_millis(20);

/// Receives the health reports of a driver; `None` if its last health stream has ended. Must not block.
pub type HealthCallback = dyn Fn(&str, Option<Vec<DeviceReport>>) + Send + Sync;

/// Dependencies of the registry.
pub struct DriversDeps {
    /// Tracks the tasks.
    pub tasks: TaskTracker,
    /// Ends the tasks. Ends of health streams are not reported from then on.
    pub shutdown: CancellationToken,
    /// Metrics of driver calls.
    pub metrics: DraMetrics,
    /// Receives health reports.
    pub on_health: Arc<HealthCallback>,
    /// Receives a driver that has had no connected endpoint for 30 s; once until it is connected again.
    pub on_gone: Arc<dyn Fn(String) + Send + Sync>,
}

/// Registered DRA drivers.
pub struct Drivers {
    deps: DriversDeps,
    table: Mutex<DriverTable<DriverClient>>,
    /// Wakes the task that reports drivers as gone.
    changed: Notify,
    /// Number of open health streams by driver. Locked during `on_health`, so that reports and ends stay in order.
    streams: Mutex<BTreeMap<String, usize>>,
}

impl Drivers {
    /// Creates an empty registry and starts its task; needs a Tokio runtime.
    pub fn new(deps: DriversDeps) -> Arc<Self> {
        let (table, streams) = (Mutex::default(), Mutex::default());
        let drivers = Arc::new(Self { deps, table, changed: Notify::new(), streams });
        let (shutdown, reporter) = (drivers.deps.shutdown.clone(), drivers.clone());
        drivers.deps.tasks.spawn(async move {
            shutdown.run_until_cancelled(report_gone(reporter)).await;
        });
        drivers
    }

    /// Whether the driver has a registered endpoint.
    pub fn is_registered(&self, driver: &str) -> bool {
        self.table().client(driver).is_some()
    }

    /// Client of the newest connected endpoint, else of the newest one; `None` if the driver is not registered.
    pub fn client(&self, driver: &str) -> Option<DriverClient> {
        self.table().client(driver).cloned()
    }

    fn table(&self) -> MutexGuard<'_, DriverTable<DriverClient>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change<T>(&self, change: impl FnOnce(&mut DriverTable<DriverClient>) -> T) -> T {
        let result = change(&mut self.table());
        self.changed.notify_one();
        result
    }

    fn streams(&self) -> MutexGuard<'_, BTreeMap<String, usize>> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn open_stream<'a>(&'a self, driver: &'a str) -> OpenHealthStream<'a> {
        *self.streams().entry(driver.to_owned()).or_default() += 1;
        OpenHealthStream { drivers: self, driver }
    }

    fn report_health(&self, driver: &str, reports: Vec<DeviceReport>) {
        let _ordered = self.streams();
        (self.deps.on_health)(driver, Some(reports));
    }
}

/// A health stream that is being read. Reports the end of the driver's last one when it is dropped.
struct OpenHealthStream<'a> {
    drivers: &'a Drivers,
    driver: &'a str,
}

impl Drop for OpenHealthStream<'_> {
    fn drop(&mut self) {
        let mut streams = self.drivers.streams();
        let count = streams.remove(self.driver).unwrap_or_default().saturating_sub(1);
        if count > 0 {
            streams.insert(self.driver.to_owned(), count);
        } else if !self.drivers.deps.shutdown.is_cancelled() {
            (self.drivers.deps.on_health)(self.driver, None);
        }
    }
}

/// Reports drivers that have had no connected endpoint for 30 s.
async fn report_gone(drivers: Arc<Drivers>) {
    loop {
        let next = drivers.table().next_gone();
        let is_due = async {
            match next {
                Some(at) => sleep_until(at).await,
                None => pending().await,
            }
        };
        tokio::select! {
            () = drivers.changed.notified() => continue,
            () = is_due => {}
        }
        let gone = drivers.table().take_gone(Instant::now());
        for driver in gone {
            info!(driverName = driver, "DRA driver has had no connected endpoint for 30s");
            (drivers.deps.on_gone)(driver);
        }
    }
}

/// Task of an endpoint: keeps the connection and the health stream.
struct EndpointTask {
    drivers: Arc<Drivers>,
    endpoint: Arc<DriverEndpoint>,
    id: RegistrationId,
    /// Whether the driver reports health, as far as known.
    reports_health: bool,
}

impl EndpointTask {
    async fn run(mut self, mut client: DriverClient) {
        let mut backoff = RECONNECT;
        loop {
            if let Ok(ended) = client.ended() {
                let connected_at = Instant::now();
                tokio::select! {
                    () = ended.cancelled() => {}
                    () = self.follow_health(&client) => {}
                }
                let DriverEndpoint { driver, socket, .. } = &*self.endpoint;
                info!(driverName = driver, endpoint = %socket.display(), "Connection to DRA driver ended");
                self.drivers.change(|table| table.disconnect(driver, self.id, Instant::now()));
                if connected_at.elapsed() >= LASTING {
                    backoff.reset();
                } else {
                    sleep(backoff.next_delay()).await;
                }
            } else {
                sleep(backoff.next_delay()).await;
            }
            client = DriverClient::dial(self.endpoint.clone(), self.drivers.deps.metrics.clone()).await;
            let state = (client.clone(), link(&client));
            let driver = &self.endpoint.driver;
            self.drivers.change(|table| table.update(driver, self.id, state, Instant::now()));
        }
    }

    /// Reads health reports; opens the stream again after its end. Never returns.
    async fn follow_health(&mut self, client: &DriverClient) {
        let DriverEndpoint { driver, socket, .. } = &*self.endpoint;
        while self.reports_health {
            match read_health(&self.drivers, driver, client).await {
                Ok(()) => info!(driverName = driver, endpoint = %socket.display(), "Health stream of DRA driver ended"),
                Err(err) if err.code == Code::Unimplemented => {
                    debug!(driverName = driver, endpoint = %socket.display(), "DRA driver does not report health");
                    self.reports_health = false;
                    break;
                }
                Err(err) => {
                    warn!(driverName = driver, endpoint = %socket.display(), %err, "Health stream of DRA driver failed");
                }
            }
            sleep(REOPEN_HEALTH).await;
        }
        pending().await
    }
}

/// Reads health reports until the stream ends.
async fn read_health(drivers: &Drivers, driver: &str, client: &DriverClient) -> Result<(), RpcError> {
    let mut stream = client.watch_health().await?;
    let _open = drivers.open_stream(driver);
    while let Some(reports) = stream.next().await? {
        drivers.report_health(driver, reports);
        sleep(HEALTH_INTERVAL).await;
    }
    Ok(())
}

fn link(client: &DriverClient) -> Link {
    match client.ended() {
        Ok(_) => Link::Connected,
        Err(error) => {
            debug!(?client, error, "Failed to connect to DRA driver");
            Link::Disconnected
        }
    }
}

/// Plugin handler that registers DRA drivers announced in the plugin directory.
pub struct DriverRegistration(pub Arc<Drivers>);

#[async_trait]
impl PluginHandler for DriverRegistration {
    fn validate(&self, plugin: &PluginInfo) -> Result<(), String> {
        choose_service(&plugin.name, &plugin.endpoint, &plugin.versions)?;
        // As in the API, case does not matter.
        let complaints = names::dns_subdomain(&plugin.name.to_ascii_lowercase());
        if !complaints.is_empty() {
            let name = quoted(cut_at_char(&plugin.name, TEXT));
            return Err(format!("invalid name of DRA driver plugin {name}: {}", complaints.join(", ")));
        }
        if !plugin.endpoint.is_absolute() {
            let (name, endpoint) = (&plugin.name, quoted(&plugin.endpoint.to_string_lossy()));
            return Err(format!(
                "invalid endpoint {endpoint} of DRA driver plugin {name}: must be the absolute path of a socket"
            ));
        }
        Ok(())
    }

    /// An endpoint that cannot be connected to yet is registered too; its task tries again.
    async fn register(&self, plugin: &PluginInfo) -> Result<(), String> {
        let (driver, socket) = (&plugin.name, &plugin.endpoint);
        let service = choose_service(driver, socket, &plugin.versions)?;
        let drivers = &self.0;
        let endpoint = Arc::new(DriverEndpoint { driver: driver.clone(), socket: socket.clone(), service });
        let client = DriverClient::dial(endpoint.clone(), drivers.deps.metrics.clone()).await;
        let stop = drivers.deps.shutdown.child_token();
        let state = (client.clone(), link(&client));
        let guard = stop.clone().drop_guard();
        let id = drivers.change(|table| table.add(driver, socket, state, guard, Instant::now()))?;
        let chosen = service.name();
        info!(driverName = driver, endpoint = %socket.display(), chosenService = chosen, "Registered DRA plugin");
        let task = EndpointTask { drivers: drivers.clone(), endpoint, id, reports_health: true };
        drivers.deps.tasks.spawn(async move {
            stop.run_until_cancelled(task.run(client)).await;
        });
        Ok(())
    }

    async fn deregister(&self, plugin: &PluginInfo) {
        let (driver, socket) = (&plugin.name, &plugin.endpoint);
        if self.0.change(|table| table.remove(driver, socket, Instant::now())) {
            info!(driverName = driver, endpoint = %socket.display(), "Deregistered DRA plugin");
        }
    }
}

#[cfg(test)]
mod tests {
    use berth_metrics::Registry;

    use super::*;

    /// Calls of `on_health` and `on_gone` as texts.
    type Calls = Arc<Mutex<Vec<String>>>;

    fn drivers() -> (Arc<Drivers>, Calls) {
        let calls = Calls::default();
        let (health, gone) = (calls.clone(), calls.clone());
        let drivers = Drivers::new(DriversDeps {
            tasks: TaskTracker::new(),
            shutdown: CancellationToken::new(),
            metrics: DraMetrics::new(&Registry::new()),
            on_health: Arc::new(move |driver: &str, reports: Option<Vec<DeviceReport>>| {
                let count = reports.map_or_else(|| "ended".to_owned(), |reports| reports.len().to_string());
                health.lock().expect("whole").push(format!("health {driver} {count}"));
            }),
            on_gone: Arc::new(move |driver| gone.lock().expect("whole").push(format!("gone {driver}"))),
        });
        (drivers, calls)
    }

    fn plugin(name: &str, endpoint: &str) -> PluginInfo {
        PluginInfo {
            kind: "DRAPlugin".to_owned(),
            name: name.to_owned(),
            endpoint: endpoint.into(),
            versions: vec!["v1.DRAPlugin".to_owned()],
            socket: "/plugins_registry/d-reg.sock".into(),
        }
    }

    fn taken(calls: &Calls) -> Vec<String> {
        std::mem::take(&mut *calls.lock().expect("whole"))
    }

    #[tokio::test]
    async fn invalid_drivers_are_refused() {
        let handler = DriverRegistration(drivers().0);
        for (name, endpoint, expected) in [
            ("gpu.example.com", "/p/dra.sock", None),
            ("GPU.example.com", "/p/dra.sock", None),
            ("gpu,spec.nodeName=x", "/p/dra.sock", Some("invalid name of DRA driver plugin \"gpu,spec.nodeName=x\": ")),
            ("", "/p/dra.sock", Some("invalid name of DRA driver plugin \"\": ")),
            ("gpu", "dra.sock", Some("invalid endpoint \"dra.sock\" of DRA driver plugin gpu: ")),
        ] {
            match (handler.validate(&plugin(name, endpoint)), expected) {
                (Ok(()), None) => {}
                (Err(error), Some(expected)) => assert!(error.starts_with(expected), "{error}"),
                (result, _) => panic!("{name}: {result:?}"),
            }
        }
        // AC-06c-18
        let other = PluginInfo { versions: vec!["v3.X".to_owned()], ..plugin("gpu", "/p/dra.sock") };
        let error = handler.validate(&other).expect_err("not supported");
        for list in ["([\"v3.X\"])", "([\"v1.DRAPlugin\" \"v1beta1.DRAPlugin\"])"] {
            assert!(error.contains(list), "{error}");
        }
        assert_eq!(handler.register(&other).await, Err(error));
    }

    /// AC-06c-23
    #[tokio::test(start_paused = true)]
    async fn a_driver_that_never_connects_is_reported_once() {
        let (drivers, calls) = drivers();
        let handler = DriverRegistration(drivers.clone());
        let directory = tempfile::tempdir().expect("a directory");
        let missing = directory.path().join("dra.sock");
        let plugin = plugin("gpu", &missing.display().to_string());
        handler.register(&plugin).await.expect("registered");
        let error = format!("endpoint {} already registered for DRA driver plugin gpu", missing.display());
        assert_eq!(handler.register(&plugin).await, Err(error));
        assert!(drivers.is_registered("gpu") && !drivers.is_registered("nic"));
        assert!(drivers.client("gpu").is_some() && drivers.client("nic").is_none());

        sleep(Duration::from_secs(29)).await;
        assert!(taken(&calls).is_empty());
        sleep(Duration::from_secs(120)).await;
        assert_eq!(taken(&calls), ["gone gpu"]);
        handler.deregister(&plugin).await;
        assert!(!drivers.is_registered("gpu"));
        sleep(Duration::from_secs(120)).await;
        assert!(taken(&calls).is_empty());

        drivers.deps.shutdown.cancel();
        drivers.deps.tasks.close();
        drivers.deps.tasks.wait().await;
    }

    #[tokio::test]
    async fn the_end_of_the_last_health_stream_is_reported() {
        let (drivers, calls) = drivers();
        let first = drivers.open_stream("gpu");
        drivers.report_health("gpu", vec![DeviceReport::default()]);
        let second = drivers.open_stream("gpu");
        drop(first);
        assert_eq!(taken(&calls), ["health gpu 1"]);
        drop(second);
        assert_eq!(taken(&calls), ["health gpu ended"]);

        let last = drivers.open_stream("gpu");
        drivers.deps.shutdown.cancel();
        drop(last);
        assert!(taken(&calls).is_empty(), "the state file keeps the health across restarts");
    }
}
