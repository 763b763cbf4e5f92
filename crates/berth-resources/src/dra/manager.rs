//! DRA manager: prepares the claims of pods through drivers, and releases them (spec 06c §3.3-3.6).
//!
//! The claims are behind one mutex that is never held across an await. An operation reserves its claims, so that calls
//! for one claim are sequential while other claims do not wait. The checkpoint is written before a driver is called: a
//! claim that may have been prepared is always known after a restart.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use async_trait::async_trait;
use futures::future::join_all;
use jiff::Timestamp;
use tokio::{sync::watch, time::Instant};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::{error, info};

use super::{
    checkpoint,
    claim_error::ClaimError,
    claim_health,
    claim_plan::{self, CheckedClaim, ContainerClaim, PreparedResults, UnpreparedResults},
    drivers::Drivers,
    health::{DeviceReport, HealthTable},
    model::{ClaimKey, Claims},
};
use crate::checkpoint_writer::CheckpointWriter;
use berth_metrics::{DraMetrics, DraOperation};
use berth_ports::{PodClaims, StateFile, StorageObjects};
use berth_types::{Pod, PodUid, api};

/// Dependencies of the DRA manager.
pub struct DraManagerDeps {
    /// The checkpoint `dra_manager_state`.
    pub file: Arc<dyn StateFile>,
    /// The state of device health, `dra_health_state`.
    pub health_file: Arc<dyn StateFile>,
    /// Reads ResourceClaims.
    pub objects: Arc<dyn StorageObjects>,
    /// Registered drivers.
    pub drivers: Arc<Drivers>,
    /// Metrics of DRA.
    pub metrics: DraMetrics,
    /// Whether `message` of device health is reported (gate `ResourceHealthStatusMessage`).
    pub reports_messages: bool,
    /// Receives pods whose devices changed their health.
    pub on_health_change: Box<dyn Fn(Vec<PodUid>) + Send + Sync>,
    /// Tracks the manager's tasks.
    pub tasks: TaskTracker,
    /// Ends the manager's tasks.
    pub shutdown: CancellationToken,
}

#[derive(Default)]
struct DraState {
    claims: Claims,
    health: HealthTable,
    /// Claims that an operation works on.
    reserved: BTreeSet<ClaimKey>,
    /// Pods whose claims are being released in the background.
    releasing: HashSet<PodUid>,
}

/// See the module documentation.
pub struct DraManager {
    deps: DraManagerDeps,
    state: Arc<Mutex<DraState>>,
    writer: CheckpointWriter,
    health_writer: CheckpointWriter,
    /// Incremented when claims are no longer reserved, and when health changes.
    changes: watch::Sender<u64>,
}

/// Why the DRA manager cannot be opened: the agent does not start.
#[derive(Debug, thiserror::Error)]
pub enum DraStartError {
    /// The checkpoint cannot be read.
    #[error("failed to get checkpoint dra_manager_state: {0}")]
    Read(io::Error),
    /// The checkpoint is damaged, or of another version.
    #[error("failed to get checkpoint dra_manager_state: {0}")]
    Decode(#[from] super::checkpoint::DraCheckpointError),
}

/// Claims reserved for an operation.
struct ClaimReservation<'a> {
    manager: &'a DraManager,
    keys: Vec<ClaimKey>,
}

impl Drop for ClaimReservation<'_> {
    fn drop(&mut self) {
        let mut state = self.manager.state();
        state.reserved.retain(|key| !self.keys.contains(key));
        drop(state);
        self.manager.changes.send_modify(|count| *count = count.wrapping_add(1));
    }
}

impl DraManager {
    /// Restores claims and health from their files.
    ///
    /// # Errors
    /// The checkpoint cannot be read or decoded. Unreadable health is logged: drivers report it again.
    pub async fn open(deps: DraManagerDeps) -> Result<Arc<Self>, DraStartError> {
        let claims = match deps.file.read().await.map_err(DraStartError::Read)? {
            Some(content) => checkpoint::decode(&content)?,
            None => Claims::new(),
        };
        let health = match deps.health_file.read().await {
            Ok(Some(content)) => HealthTable::decode(&content).unwrap_or_else(|err| {
                error!(path = %deps.health_file.path().display(), %err, "Failed to read health of DRA devices");
                HealthTable::default()
            }),
            Ok(None) => HealthTable::default(),
            Err(err) => {
                error!(path = %deps.health_file.path().display(), %err, "Failed to read health of DRA devices");
                HealthTable::default()
            }
        };
        let state = Arc::new(Mutex::new(DraState { claims, health, ..DraState::default() }));
        let (claims_of, health_of) = (state.clone(), state.clone());
        let writer = CheckpointWriter::spawn(&deps.tasks, &deps.shutdown, deps.file.clone(), move || {
            checkpoint::encode(&lock(&claims_of).claims)
        });
        let health_writer = CheckpointWriter::spawn(&deps.tasks, &deps.shutdown, deps.health_file.clone(), move || {
            lock(&health_of).health.encode()
        });
        let counted = state.clone();
        deps.metrics.register_in_use(move || in_use(&lock(&counted).claims));
        let manager = Arc::new(Self { deps, state, writer, health_writer, changes: watch::Sender::new(0) });
        let expiring = manager.clone();
        let shutdown = manager.deps.shutdown.clone();
        manager.deps.tasks.spawn(async move {
            shutdown.run_until_cancelled(expire_health(expiring)).await;
        });
        Ok(manager)
    }

    /// Takes over a driver's health reports; `None` if its stream has ended.
    pub fn report_health(&self, driver: &str, reports: Option<Vec<DeviceReport>>) {
        let changed = {
            let mut state = self.state();
            match reports {
                Some(reports) => state.health.update(driver, reports, Timestamp::now()).changed,
                None => state.health.drop_driver(driver),
            }
        };
        self.publish_health(&[(driver.to_owned(), changed)].into());
    }

    fn publish_health(&self, changed: &BTreeMap<String, BTreeSet<(String, String)>>) {
        if changed.values().all(BTreeSet::is_empty) {
            return;
        }
        self.health_writer.request();
        self.changes.send_modify(|count| *count = count.wrapping_add(1));
        let has_changed = |driver: &String, pool: &str, device: &str| {
            changed.get(driver).is_some_and(|devices| devices.contains(&(pool.to_owned(), device.to_owned())))
        };
        let pods: BTreeSet<PodUid> = {
            let state = self.state();
            let affected = state.claims.values().filter(|claim| {
                claim.drivers.iter().any(|(driver, devices)| {
                    devices.iter().any(|device| has_changed(driver, &device.pool, &device.device))
                })
            });
            affected.flat_map(|claim| claim.pods.iter().cloned()).collect()
        };
        if !pods.is_empty() {
            (self.deps.on_health_change)(pods.into_iter().collect());
        }
    }

    /// Claims of a container, for the PodResources API: name, and the devices by driver.
    ///
    /// # Errors
    /// A claim of the container is not known.
    pub fn claims_of(&self, pod: &Pod, container: &api::Container) -> Result<Vec<ContainerClaim>, String> {
        let state = self.state();
        claim_plan::container_claims(pod, container, &state.claims).map_err(|error| error.to_string())
    }

    fn state(&self) -> MutexGuard<'_, DraState> {
        lock(&self.state)
    }

    /// Waits until no other operation works on these claims, and reserves them.
    async fn reserve(&self, keys: Vec<ClaimKey>) -> ClaimReservation<'_> {
        let mut changes = self.changes.subscribe();
        loop {
            {
                let mut state = self.state();
                if !keys.iter().any(|key| state.reserved.contains(key)) {
                    state.reserved.extend(keys.iter().cloned());
                    return ClaimReservation { manager: self, keys };
                }
            }
            // The sender lives as long as the manager.
            let _ = changes.changed().await;
        }
    }

    async fn prepare_claims(&self, pod: &Arc<Pod>) -> Result<(), String> {
        let checked = self.checked_claims(pod).await?;
        if checked.is_empty() {
            return Ok(());
        }
        let reservation = self.reserve(checked.iter().map(|claim| claim.key.clone()).collect()).await;
        let text = |error: ClaimError| error.to_string();
        let keys = claim_plan::add_reference(&mut self.state().claims, pod.uid(), &checked).map_err(text)?;
        self.writer.write().await?;
        if keys.is_empty() {
            return Ok(());
        }
        let batches: Vec<(String, Vec<ClaimKey>)> =
            claim_plan::batches(&self.state().claims, &keys).into_iter().collect();
        let calls = batches.iter().map(|(driver, batch)| self.call_prepare(driver, batch));
        let mut outcome = Ok(());
        for ((driver, batch), answer) in batches.iter().zip(join_all(calls).await) {
            let merged =
                answer.and_then(|results| claim_plan::merge_prepared(&mut self.state().claims, driver, batch, results));
            outcome = outcome.and(merged);
        }
        if outcome.is_ok() {
            outcome = claim_plan::mark_prepared(&mut self.state().claims, &keys);
        }
        let written = self.writer.write().await;
        drop(reservation);
        outcome.map_err(text).and(written)
    }

    async fn call_prepare(&self, driver: &str, batch: &[ClaimKey]) -> Result<PreparedResults, ClaimError> {
        let client = self.deps.drivers.client(driver);
        let client = client.ok_or_else(|| ClaimError::DriverNotRegistered { driver: driver.to_owned() })?;
        client.prepare(&self.with_uids(batch)).await
    }

    async fn call_unprepare(&self, driver: &str, batch: &[ClaimKey]) -> Result<UnpreparedResults, ClaimError> {
        let client = self.deps.drivers.client(driver);
        let client = client.ok_or_else(|| ClaimError::DriverNotRegistered { driver: driver.to_owned() })?;
        client.unprepare(&self.with_uids(batch)).await
    }

    fn with_uids(&self, batch: &[ClaimKey]) -> Vec<(ClaimKey, String)> {
        let state = self.state();
        let uid = |key: &ClaimKey| state.claims.get(key).map(|claim| (key.clone(), claim.uid.clone()));
        batch.iter().filter_map(uid).collect()
    }

    /// Reads and checks all claims of a pod before any state changes.
    async fn checked_claims(&self, pod: &Arc<Pod>) -> Result<Vec<CheckedClaim>, String> {
        let names = claim_plan::claim_names(pod).map_err(|error| error.to_string())?;
        let mut checked = Vec::new();
        for pod_claim in names {
            let Some(name) = &pod_claim.claim else { continue };
            let object = self.deps.objects.resource_claim(pod.namespace(), name).await;
            let object = object.map_err(|error| format!("fetch ResourceClaim {name}: {error}"))?;
            let is_registered = |driver: &str| self.deps.drivers.is_registered(driver);
            let claim = claim_plan::check(pod, &pod_claim, &object, &is_registered);
            checked.push(claim.map_err(|error| error.to_string())?);
        }
        Ok(checked)
    }

    async fn unprepare_claims(&self, pod: &PodUid) -> Result<(), String> {
        let keys: Vec<ClaimKey> = {
            let state = self.state();
            let of_pod = state.claims.iter().filter(|(_, claim)| claim.pods.contains(pod));
            of_pod.map(|(key, _)| key.clone()).collect()
        };
        if keys.is_empty() {
            return Ok(());
        }
        let reservation = self.reserve(keys).await;
        let plan = claim_plan::unprepare_plan(&mut self.state().claims, pod);
        let calls = plan
            .batches
            .iter()
            .map(|(driver, batch)| async move { (driver.clone(), self.call_unprepare(driver, batch).await) });
        let results: BTreeMap<String, Result<UnpreparedResults, ClaimError>> =
            join_all(calls).await.into_iter().collect();
        let outcome = claim_plan::merge_unprepared(&mut self.state().claims, pod, &plan, &results);
        let is_due = outcome.is_checkpoint_due || plan.has_dropped_reference;
        let written = if is_due { self.writer.write().await } else { Ok(()) };
        drop(reservation);
        outcome.result.map_err(|error| error.to_string()).and(written)
    }
}

fn lock(state: &Mutex<DraState>) -> MutexGuard<'_, DraState> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Number of prepared claims by driver, and of all under `<any>`.
fn in_use(claims: &Claims) -> BTreeMap<String, i64> {
    let mut counts = BTreeMap::from([("<any>".to_owned(), 0)]);
    for claim in claims.values().filter(|claim| claim.is_prepared) {
        for name in claim.drivers.keys().map(String::as_str).chain(["<any>"]) {
            *counts.entry(name.to_owned()).or_insert(0) += 1;
        }
    }
    counts
}

/// Reports devices whose health has expired: drivers need not send a message for that.
async fn expire_health(manager: Arc<DraManager>) {
    let mut changes = manager.changes.subscribe();
    loop {
        let next = manager.state().health.next_expiry(Timestamp::now());
        let expiry = async {
            match next {
                Some(delay) => tokio::time::sleep(delay).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = changes.changed() => {}
            () = expiry => {
                let changed = manager.state().health.expire(Timestamp::now());
                manager.publish_health(&changed);
            }
        }
    }
}

/// [`DraManager`] as a port of the engine.
#[derive(Clone)]
pub struct PodClaimPreparer(pub Arc<DraManager>);

#[async_trait]
impl PodClaims for PodClaimPreparer {
    async fn prepare(&self, pod: &Arc<Pod>) -> Result<(), String> {
        let has_claims = pod.spec().resource_claims.as_ref().is_some_and(|claims| !claims.is_empty());
        let status = pod.status.as_ref();
        if !has_claims && status.is_none_or(|status| status.extended_resource_claim_status.is_none()) {
            return Ok(());
        }
        let began = Instant::now();
        let outcome = self.0.prepare_claims(pod).await;
        self.0.deps.metrics.operation(DraOperation::Prepare, outcome.is_err(), began.elapsed());
        outcome.map_err(|text| format!("prepare dynamic resources: {text}"))
    }

    async fn unprepare(&self, pod: &PodUid) -> Result<(), String> {
        if !claim_plan::uses(&self.0.state().claims, pod) {
            return Ok(());
        }
        let began = Instant::now();
        let outcome = self.0.unprepare_claims(pod).await;
        self.0.deps.metrics.operation(DraOperation::Unprepare, outcome.is_err(), began.elapsed());
        outcome.map_err(|text| format!("unprepare dynamic resources: {text}"))
    }

    fn cdi_devices(&self, pod: &Pod, container: &api::Container) -> Result<Vec<String>, String> {
        claim_plan::cdi_devices(pod, container, &self.0.state().claims).map_err(|error| error.to_string())
    }

    fn health(&self, pod: &Pod, container: &str) -> Vec<api::ResourceStatus> {
        let Some((_, container)) = pod.container(container) else { return Vec::new() };
        let state = self.0.state();
        let message = self.0.deps.reports_messages;
        claim_health::statuses(pod, container, &state.claims, &state.health, Timestamp::now(), message)
    }

    fn reconcile(&self, active: &HashSet<PodUid>) {
        let gone: Vec<PodUid> = {
            let mut state = self.0.state();
            let used = claim_plan::pods_in_use(&state.claims);
            let gone: Vec<PodUid> = used.into_iter().filter(|pod| !active.contains(pod)).collect();
            gone.into_iter().filter(|pod| state.releasing.insert(pod.clone())).collect()
        };
        for pod in gone {
            let (claims, shutdown) = (self.clone(), self.0.deps.shutdown.clone());
            self.0.deps.tasks.spawn(async move {
                let released = shutdown.run_until_cancelled(claims.unprepare(&pod)).await;
                match released {
                    Some(Ok(())) => info!(podUID = %pod, "Released resource claims of deleted pod"),
                    Some(Err(err)) => error!(podUID = %pod, err, "Failed to release resource claims of deleted pod"),
                    None => {}
                }
                claims.0.state().releasing.remove(&pod);
            });
        }
    }
}
