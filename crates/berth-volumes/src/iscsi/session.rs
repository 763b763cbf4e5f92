//! iSCSI login and logout through `iscsiadm`, with multipath support.
//!
//! Implements spec 07 §7.8.

use std::{
    collections::{BTreeMap, HashMap},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Duration,
};

use tokio::{
    sync::Semaphore,
    time::{Instant, sleep},
};
use tracing::{debug, info, warn};

use super::{
    calls::{self, ALREADY_EXISTS, Call, NOTHING_TO_DO},
    names::{self, IscsiTarget},
    record::LoginRecord,
};
use crate::{
    attachable::OpError,
    machine::{self, KillPolicy, ProgramExit, RunError, Work},
    scsi::{Links, ScsiDisks},
};
use berth_types::cut_at_char;

/// Timeout of one `iscsiadm` call: a login waits for the portal.
const CALLING: Duration = Duration::from_secs(120);
/// How long to wait for a disk after its LUN was scanned.
const APPEARING: Duration = Duration::from_secs(30);
/// How long to wait for a multipath device: with several portals, and with one.
const JOINING: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(1));
/// Polling interval.
const POLL_INTERVAL: Duration = Duration::from_millis(250);
/// Maximum rounds over all portals, and the round from which [`ENOUGH`] paths suffice.
const ROUNDS: (u32, u32) = (5, 2);
/// Paths that make a multipath device.
const ENOUGH: usize = 2;
/// Maximum bytes of `iscsiadm` output in an error message.
const SHOWN: usize = 512;

/// Sessions of this node's initiator.
pub struct Sessions {
    blocks: ScsiDisks,
    /// Semaphores by target: serialize its logins and logouts.
    turns: Mutex<HashMap<String, Weak<Semaphore>>>,
}

/// Why a portal provides no path to the disk.
type Cause = String;

/// Certainty after a failed call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum CallCertainty {
    /// The call was rejected or not started.
    Refused,
    /// The call timed out or was canceled: it may still take effect.
    Nothing,
}

fn answer(call: &Call, ended: ProgramExit) -> Result<String, Cause> {
    if ended.is_success() {
        return Ok(ended.output);
    }
    let output = cut_at_char(&ended.output, SHOWN);
    Err(format!("iscsi: failed to {}: {} ({})", call.what, output, ended.how))
}

fn unanswered(call: &Call, error: &RunError) -> Cause {
    format!("iscsi: failed to {}: {error}", call.what)
}

impl Sessions {
    /// Creates the session manager of a host.
    pub fn new(blocks: ScsiDisks) -> Self {
        Self { blocks, turns: Mutex::default() }
    }

    fn turn(&self, iqn: &str) -> Arc<Semaphore> {
        let mut all = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(turn) = all.get(iqn).and_then(Weak::upgrade) {
            return turn;
        }
        all.retain(|_, turn| turn.strong_count() > 0);
        let turn = Arc::new(Semaphore::new(1));
        all.insert(iqn.to_owned(), Arc::downgrade(&turn));
        turn
    }

    async fn run_on_disks<T: Send + 'static>(
        &self,
        work: &Work,
        action: impl FnOnce(&ScsiDisks) -> T + Send + 'static,
    ) -> Result<T, OpError> {
        let blocks = self.blocks.clone();
        work.operation().blocking(move || Ok(action(&blocks))).await
    }

    async fn call(&self, work: &Work, call: &Call) -> Result<ProgramExit, Cause> {
        let ended = work.run("iscsiadm", &call.arguments, KillPolicy::Within(CALLING)).await;
        ended.map_err(|error| unanswered(call, &error))
    }

    /// Runs a call that must succeed.
    async fn run_required(&self, work: &Work, call: &Call) -> Result<String, Cause> {
        answer(call, self.call(work, call).await?)
    }

    /// Runs a call that must succeed and waits for the portal; canceled when the pod is deleted.
    async fn wait_for(&self, work: &Work, call: &Call) -> Result<String, (Cause, CallCertainty)> {
        match work.run("iscsiadm", &call.arguments, KillPolicy::UnlessCanceled(CALLING)).await {
            Ok(ended) => answer(call, ended).map_err(|cause| (cause, CallCertainty::Refused)),
            Err(error @ RunError::NotStarted(_)) => Err((unanswered(call, &error), CallCertainty::Refused)),
            Err(error) => Err((unanswered(call, &error), CallCertainty::Nothing)),
        }
    }

    /// Runs a call whose failure is only logged.
    async fn run_best_effort(&self, work: &Work, call: &Call) {
        if let Err(error) = self.run_required(work, call).await {
            debug!(err = %error, "iscsiadm command failed");
        }
    }

    /// Logs in to all portals, and waits for the disk: the multipath device if there is one.
    ///
    /// # Errors
    /// If no portal provides a path to the disk.
    pub async fn attach(
        &self,
        work: &Work,
        target: &IscsiTarget,
        secret: &BTreeMap<String, String>,
    ) -> Result<PathBuf, OpError> {
        let turn = self.turn(&target.iqn);
        let _alone = turn.acquire().await.map_err(|_| OpError::transient("the operation was aborted"))?;
        let shown =
            self.run_required(work, &calls::show_interface(&target.base_interface)).await.map_err(OpError::failed)?;
        let transport = calls::transport(&shown);
        let transport = transport
            .ok_or_else(|| OpError::failed(format!("Could not parse iface file for {}", target.base_interface)))?;
        if let Some(initiator) = &target.initiator {
            self.clone_interface(work, target, &shown, initiator).await.map_err(OpError::failed)?;
        }
        let (mut ways, mut logged_in, mut last) = (BTreeMap::new(), Vec::new(), String::new());
        for round in 1..=ROUNDS.0 {
            for portal in &target.portals {
                if work.operation().is_canceled() {
                    break;
                }
                if ways.contains_key(portal) {
                    continue;
                }
                match self.path_through_portal(work, target, portal, &transport, secret, &mut logged_in).await {
                    Ok(way) => drop(ways.insert(portal.clone(), way)),
                    Err(cause) => {
                        warn!(%portal, iqn = %target.iqn, err = %cause, "Failed to attach iSCSI disk through portal");
                        last = cause;
                    }
                }
            }
            let enough = ways.len() >= ENOUGH && round >= ROUNDS.1;
            if work.operation().is_canceled() || ways.is_empty() || ways.len() == target.portals.len() || enough {
                break;
            }
        }
        if ways.is_empty() {
            self.revert_logins(work, target, &logged_in).await;
            return Err(OpError::failed(format!("failed to get any path for iscsi disk, last err seen:\n{last}")));
        }
        self.multipath_or_first(work, ways.into_values().collect(), target.portals.len() > 1).await
    }

    /// Reverts the logins of this attempt, which nothing else records.
    async fn revert_logins(&self, work: &Work, target: &IscsiTarget, logged_in: &[String]) {
        for portal in logged_in {
            self.run_best_effort(work, &calls::logout(portal, &target.iqn, &target.interface)).await;
            self.run_best_effort(work, &calls::delete_node(portal, &target.iqn, &target.interface)).await;
        }
        if target.initiator.is_some() {
            self.run_best_effort(work, &calls::delete_interface(&target.interface)).await;
        }
    }

    async fn clone_interface(
        &self,
        work: &Work,
        target: &IscsiTarget,
        shown: &str,
        initiator: &str,
    ) -> Result<(), Cause> {
        let made = self.call(work, &calls::new_interface(&target.interface)).await?;
        if !made.is_success() && made.code != Some(ALREADY_EXISTS) {
            let output = cut_at_char(&made.output, SHOWN);
            return Err(format!("iscsi: failed to create new iface: {output} ({})", made.how));
        }
        for call in calls::clone_interface(&target.interface, shown, initiator) {
            if let Err(error) = self.run_required(work, &call).await {
                self.run_best_effort(work, &calls::delete_interface(&target.interface)).await;
                return Err(error);
            }
        }
        Ok(())
    }

    async fn host(&self, work: &Work, iqn: &str, portal: &str) -> Result<Option<u32>, Cause> {
        let (iqn, portal) = (iqn.to_owned(), portal.to_owned());
        let found = self.run_on_disks(work, move |blocks| blocks.portals(&iqn).get(&portal).copied()).await;
        found.map_err(|error| error.to_string())
    }

    /// Returns the link to the disk through one portal.
    async fn path_through_portal(
        &self,
        work: &Work,
        target: &IscsiTarget,
        portal: &str,
        transport: &str,
        secret: &BTreeMap<String, String>,
        logged_in: &mut Vec<String>,
    ) -> Result<PathBuf, Cause> {
        let mut host = self.host(work, &target.iqn, portal).await?;
        if host.is_none() {
            self.login(work, target, portal, secret).await?;
            logged_in.push(portal.to_owned());
            host = self.host(work, &target.iqn, portal).await?;
        }
        match host {
            Some(host) => {
                let lun = target.lun;
                let scanned =
                    self.run_on_disks(work, move |blocks| blocks.scan(host, lun)).await.map_err(|e| e.to_string())?;
                scanned.map_err(|error| format!("iscsi: failed to scan SCSI host {host}: {error}"))?;
            }
            // A portal given by name: its address is unknown, but the disk may still appear.
            None => warn!(%portal, "Could not get SCSI host number for portal after logging in"),
        }
        let until = Instant::now() + APPEARING;
        loop {
            let found = self.link(work, &target.iqn, target.lun, portal, transport).await.map_err(|e| e.to_string())?;
            if let Some(found) = found {
                return Ok(found);
            }
            if work.operation().is_canceled() {
                return Err(RunError::Canceled.to_string());
            }
            if Instant::now() >= until {
                return Err(format!("Could not attach disk: Timeout after {APPEARING:?}"));
            }
            sleep(POLL_INTERVAL).await;
        }
    }

    async fn link(
        &self,
        work: &Work,
        iqn: &str,
        lun: i32,
        portal: &str,
        transport: &str,
    ) -> Result<Option<PathBuf>, OpError> {
        let (iqn, portal, transport) = (iqn.to_owned(), portal.to_owned(), transport.to_owned());
        self.run_on_disks(work, move |blocks| {
            let fits = |link: &str| names::is_path_link(link, &transport, (&portal, &iqn, lun));
            blocks.links(Links::ByPath, fits).into_iter().next()
        })
        .await
    }

    async fn login(
        &self,
        work: &Work,
        target: &IscsiTarget,
        portal: &str,
        secret: &BTreeMap<String, String>,
    ) -> Result<(), Cause> {
        let (new, proofs, discover) = calls::discovery(target, portal, secret);
        self.run_best_effort(work, &new).await;
        for proof in &proofs {
            self.run_required(work, proof).await?;
        }
        if let Err((error, _)) = self.wait_for(work, &discover).await {
            self.run_best_effort(work, &calls::delete_discovery(target, portal)).await;
            return Err(error);
        }
        for setting in calls::settings_of_session(target, portal, secret) {
            self.run_required(work, &setting).await?;
        }
        if let Err((error, certainty)) = self.wait_for(work, &calls::login(target, portal)).await {
            if certainty == CallCertainty::Nothing {
                // The initiator may continue the login after the timeout.
                self.run_best_effort(work, &calls::logout(portal, &target.iqn, &target.interface)).await;
            }
            self.run_best_effort(work, &calls::delete_node(portal, &target.iqn, &target.interface)).await;
            return Err(error);
        }
        self.run_best_effort(work, &calls::manual_startup(target, portal)).await;
        Ok(())
    }

    /// Returns the multipath device of the paths; the first path if there is none in time.
    async fn multipath_or_first(&self, work: &Work, ways: Vec<PathBuf>, is_likely: bool) -> Result<PathBuf, OpError> {
        let until = Instant::now() + if is_likely { JOINING.0 } else { JOINING.1 };
        loop {
            let paths = ways.clone();
            let found = self.run_on_disks(work, move |blocks| multipath(blocks, &paths)).await?;
            if let Some(found) = found {
                return Ok(found);
            }
            if Instant::now() >= until {
                return ways.into_iter().next().ok_or_else(|| OpError::failed("no path to the disk found"));
            }
            sleep(POLL_INTERVAL).await;
        }
    }

    /// Returns the disk of an attached LUN.
    ///
    /// # Errors
    /// If no disk of the LUN exists.
    pub async fn device(&self, work: &Work, target: &IscsiTarget) -> Result<PathBuf, OpError> {
        let (iqn, lun) = (target.iqn.clone(), target.lun);
        let found = self.run_on_disks(work, move |blocks| {
            let disks: Vec<PathBuf> = blocks.units(&iqn, lun).iter().map(|disk| blocks.device(disk)).collect();
            multipath(blocks, &disks).or_else(|| disks.into_iter().next())
        });
        found
            .await?
            .ok_or_else(|| OpError::transient(format!("no disk found for LUN {} of target {}", target.lun, target.iqn)))
    }

    /// Deletes the disks of a LUN, and logs out if no other LUN of the target is used on this node.
    ///
    /// # Errors
    /// If a logout fails.
    pub async fn detach(
        &self,
        work: &Work,
        record: &LoginRecord,
        directory: &Path,
        bases: [PathBuf; 2],
    ) -> Result<(), OpError> {
        let turn = self.turn(&record.iqn);
        let _alone = turn.acquire().await.map_err(|_| OpError::transient("the operation was aborted"))?;
        self.delete_disks(work, record).await?;
        if self.has_other_luns(work, directory, bases).await? {
            info!(iqn = %record.iqn, "Keeping iSCSI sessions, other LUNs of the target are in use");
            return Ok(());
        }
        let mut portals: Vec<&String> = Vec::new();
        record.portals.iter().filter(|portal| !portal.is_empty()).for_each(|portal| {
            if !portals.contains(&portal) {
                portals.push(portal);
            }
        });
        if portals.is_empty() {
            let cause = "Couldn't get connected portals from configurations";
            return Err(OpError::failed(format!("iscsi detach disk: failed to detach iscsi disk. {cause}")));
        }
        for portal in &portals {
            info!(%portal, iqn = %record.iqn, iface = %record.iface, "Logging out of iSCSI target");
            for call in [
                calls::logout(portal, &record.iqn, &record.iface),
                calls::delete_node(portal, &record.iqn, &record.iface),
            ] {
                self.run_idempotent(work, &call).await?;
            }
        }
        let own = portals.first().map(|portal| format!("{portal}:{}", record.vol_name));
        if !record.initiator_name.is_empty() && own.as_ref() == Some(&record.iface) {
            self.run_best_effort(work, &calls::delete_interface(&record.iface)).await;
        }
        Ok(())
    }

    /// Runs a call of the teardown; a result that it was already done counts as success.
    async fn run_idempotent(&self, work: &Work, call: &Call) -> Result<(), OpError> {
        let ended = self.call(work, call).await.map_err(OpError::uncertain)?;
        if ended.is_success() || ended.code.is_some_and(|code| NOTHING_TO_DO.contains(&code)) {
            return Ok(());
        }
        let output = cut_at_char(&ended.output, SHOWN);
        Err(OpError::uncertain(format!("iscsi: failed to {}: {output} ({})", call.what, ended.how)))
    }

    async fn delete_disks(&self, work: &Work, record: &LoginRecord) -> Result<(), OpError> {
        let Ok(lun) = record.lun.parse::<i32>() else { return Ok(()) };
        let iqn = record.iqn.clone();
        let (disks, joined) = self
            .run_on_disks(work, move |blocks| {
                let disks = blocks.units(&iqn, lun);
                let mut joined: Vec<String> = disks.iter().filter_map(|disk| blocks.multipath(disk)).collect();
                joined.sort();
                joined.dedup();
                (disks, joined)
            })
            .await?;
        for device in joined {
            let device = self.blocks.device(&device).display().to_string();
            match work.run("multipath", &["-f".to_owned(), device.clone()], KillPolicy::Within(CALLING)).await {
                Ok(ended) if ended.is_success() => {}
                // The disks are deleted even if the flush fails.
                Ok(ended) => {
                    warn!(%device, output = %cut_at_char(&ended.output, SHOWN), "Failed to flush multipath device map")
                }
                Err(error) => warn!(%device, err = %error, "Failed to flush multipath device map"),
            }
        }
        self.run_on_disks(work, move |blocks| {
            for disk in disks {
                if let Err(error) = blocks.delete(&disk) {
                    warn!(%disk, err = %error, "Failed to delete block device");
                }
            }
        })
        .await
    }

    /// Whether another LUN of the target has a directory, or a mount, on this node.
    async fn has_other_luns(&self, work: &Work, directory: &Path, bases: [PathBuf; 2]) -> Result<bool, OpError> {
        let (directory, machine) = (directory.to_owned(), work.machine().clone());
        let search = work.operation().blocking(move || {
            let Some(start) = names::target_prefix(&directory).map(str::to_owned) else { return Ok(false) };
            let interface = directory.parent().and_then(Path::file_name).unwrap_or_default().to_owned();
            let table = machine.mounts().map_err(machine::mount_table_error)?;
            for base in bases {
                let own = base.join(&interface);
                let is_other = |path: &Path| {
                    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
                    path != directory && name.starts_with(&start) && names::parse(path).is_some()
                };
                let there = std::fs::read_dir(&own).into_iter().flatten().flatten();
                if there.map(|entry| entry.path()).any(|path| is_other(&path)) {
                    return Ok(true);
                }
                let mut mounted = table.iter().filter_map(|mount| mount.target.strip_prefix(&own).ok()?.iter().next());
                if mounted.any(|name| is_other(&own.join(name))) {
                    return Ok(true);
                }
            }
            Ok(false)
        });
        search.await
    }
}

fn multipath(blocks: &ScsiDisks, ways: &[PathBuf]) -> Option<PathBuf> {
    let found = ways.iter().find_map(|way| blocks.multipath(&blocks.disk(way)?))?;
    Some(blocks.device(&found))
}
