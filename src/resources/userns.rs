//! Allocates host ID ranges for pods with their own user namespace, and persists them.
//!
//! One table, changed only on the blocking pool and only together with the pod's file, so that
//! allocations survive a crash: `<root>/pods/<uid>/userns`. Implements spec 06 §5.

use std::{
    fs::{self, DirBuilder},
    io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    process::Stdio,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use tracing::{error, info};

use super::{
    id_file,
    id_space::{IdSpace, IdSpaceError},
    id_table::IdTable,
    manager::blocking,
};
use berth_ports::{IdRange, ResourceError, UserNamespaces};
use berth_sys::atomic_file;
use berth_types::PodUid;

const FILE: &str = "userns";
/// Timeout of `getsubids`.
const SUBIDS_LIMIT: Duration = Duration::from_secs(10);

/// The host ID ranges of all pods on this node.
pub struct IdRanges(Arc<IdRangesInner>);

struct IdRangesInner {
    pods: PathBuf,
    table: Mutex<IdTable>,
}

impl IdRanges {
    /// Reads the files below `root_dir` (`--root-dir`) of the pods on disk.
    ///
    /// # Errors
    /// A pod's file is malformed or does not fit: its IDs might be allocated twice.
    pub async fn open(root_dir: &Path, space: IdSpace) -> Result<Self, ResourceError> {
        let shared = Arc::new(IdRangesInner { pods: root_dir.join("pods"), table: Mutex::new(IdTable::new(space)) });
        let job = shared.clone();
        blocking("user namespaces", move || job.read_all()).await?;
        Ok(Self(shared))
    }

    /// Releases ranges of pods whose file was removed with their directory.
    pub async fn prune(&self) {
        let shared = self.0.clone();
        if let Err(e) = blocking("user namespaces", move || shared.prune()).await {
            error!(err = %e, "Failed to release host IDs of removed pods");
        }
    }
}

impl IdRangesInner {
    fn table(&self) -> MutexGuard<'_, IdTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn file(&self, pod: &PodUid) -> Result<PathBuf, ResourceError> {
        let uid = pod.as_str();
        if matches!(uid, "" | "." | "..") || uid.contains(['/', '\0']) {
            return Err(ResourceError(format!("pod UID {uid:?} is not a valid directory name")));
        }
        Ok(self.pods.join(uid).join(FILE))
    }

    fn read_all(&self) -> Result<(), ResourceError> {
        let list = match fs::read_dir(&self.pods) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            other => other.map_err(|e| ResourceError(format!("{}: {e}", self.pods.display())))?,
        };
        for uid in list.flatten().filter_map(|entry| entry.file_name().into_string().ok()) {
            let uid = PodUid::from(uid);
            let recorded = self.recorded(&uid);
            recorded.map_err(|e| ResourceError(format!("record pod mappings for existing pod {uid:?}: {e}")))?;
        }
        Ok(())
    }

    /// Reads the range from a pod's file, and records it in the table.
    fn recorded(&self, pod: &PodUid) -> Result<Option<IdRange>, ResourceError> {
        let path = self.file(pod)?;
        let content = atomic_file::read(&path).map_err(|e| ResourceError(format!("{}: {e}", path.display())))?;
        let Some(content) = content else { return Ok(None) };
        let (first, length) = id_file::decode(&content).map_err(text_of)?;
        self.table().record(pod, first, length).map_err(text_of)?;
        Ok(Some(IdRange { first, length }))
    }

    fn assign(&self, pod: &PodUid) -> Result<IdRange, ResourceError> {
        if let Some(range) = self.recorded(pod)? {
            return Ok(range);
        }
        let path = self.file(pod)?;
        let mut table = self.table();
        let (first, length) = (table.allocate(pod).map_err(text_of)?, table.length());
        let directory = path.parent().unwrap_or(&self.pods);
        let written = DirBuilder::new()
            .recursive(true)
            .mode(0o750)
            .create(directory)
            .and_then(|()| atomic_file::replace(&path, &id_file::encode(first, length), 0o644));
        if let Err(e) = written {
            table.release(pod);
            return Err(ResourceError(format!("{}: {e}", path.display())));
        }
        info!(podUID = %pod, hostId = first, length, "Assigned host IDs");
        Ok(IdRange { first, length })
    }

    fn release(&self, pod: &PodUid) -> Result<(), ResourceError> {
        if self.table().of(pod).is_none() {
            return Ok(());
        }
        let path = self.file(pod)?;
        match fs::remove_file(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                // The range stays allocated: after a restart the file would claim it again.
                return Err(ResourceError(format!("{}: {e}", path.display())));
            }
            _ => self.table().release(pod),
        }
        Ok(())
    }

    fn prune(&self) -> Result<(), ResourceError> {
        let mut table = self.table();
        let pods: Vec<PodUid> = table.pods().cloned().collect();
        for pod in pods {
            if self.file(&pod).is_ok_and(|file| !file.exists()) {
                table.release(&pod);
            }
        }
        Ok(())
    }
}

#[async_trait]
impl UserNamespaces for IdRanges {
    async fn assign(&self, pod: &PodUid) -> Result<IdRange, ResourceError> {
        let (shared, pod) = (self.0.clone(), pod.clone());
        blocking("user namespaces", move || shared.assign(&pod)).await
    }

    async fn release(&self, pod: &PodUid) {
        let (shared, uid) = (self.0.clone(), pod.clone());
        if let Err(e) = blocking("user namespaces", move || shared.release(&uid)).await {
            error!(podUID = %pod, err = %e, "Failed to release host IDs");
        }
    }
}

/// Host ID space of this node: the subordinate IDs of the user `kubelet` if it exists and `getsubids`
/// is installed, else all IDs above the first range.
///
/// # Errors
/// The user exists but its IDs cannot be determined: they must not be replaced by a guess.
pub async fn discover(per_pod: u64, max_pods: u64) -> Result<IdSpace, ResourceError> {
    let has_user = blocking("user kubelet", || {
        nix::unistd::User::from_name("kubelet").map(|user| user.is_some()).map_err(text_of)
    });
    if !has_user.await? {
        return IdSpace::whole(per_pod).checked(max_pods).map_err(text_of);
    }
    let Some(users) = subids(&["kubelet"]).await? else {
        return IdSpace::whole(per_pod).checked(max_pods).map_err(text_of);
    };
    let groups = subids(&["-g", "kubelet"]).await?.unwrap_or_default();
    let space = IdSpace::of_subids(&users, &groups, per_pod).and_then(|space| space.checked(max_pods));
    space.map_err(|e: IdSpaceError| text_of(e))
}

/// Output of `getsubids`; `None` if it is not installed.
async fn subids(arguments: &[&str]) -> Result<Option<String>, ResourceError> {
    let run =
        tokio::process::Command::new("getsubids").args(arguments).stdin(Stdio::null()).kill_on_drop(true).output();
    let output = match tokio::time::timeout(SUBIDS_LIMIT, run).await {
        Err(_) => return Err(ResourceError(format!("getsubids: timed out after {SUBIDS_LIMIT:?}"))),
        Ok(Err(e)) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Ok(other) => other.map_err(|e| ResourceError(format!("getsubids: {e}")))?,
    };
    if !output.status.success() {
        let words = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(ResourceError(format!("getsubids failed with {}: {words}", output.status)));
    }
    String::from_utf8(output.stdout).map(Some).map_err(|e| ResourceError(format!("getsubids: {e}")))
}

fn text_of(error: impl std::fmt::Display) -> ResourceError {
    ResourceError(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    const N: u32 = 65_536;

    fn space() -> IdSpace {
        IdSpace::whole(N.into()).checked(110).expect("enough")
    }

    #[tokio::test]
    async fn ranges_survive_a_restart() {
        // AC-06-8, AC-06-9
        let root = tempfile::tempdir().expect("a directory");
        let ranges = IdRanges::open(root.path(), space()).await.expect("nothing there");
        let first = |ids: u32| IdRange { first: ids, length: N };
        assert_eq!(ranges.assign(&"a".into()).await, Ok(first(N)));
        assert_eq!(ranges.assign(&"b".into()).await, Ok(first(2 * N)));
        let again = IdRanges::open(root.path(), space()).await.expect("readable");
        assert_eq!(again.assign(&"b".into()).await, Ok(first(2 * N)));
        again.release(&"a".into()).await;
        assert!(!root.path().join("pods/a/userns").exists());
        assert_eq!(again.assign(&"c".into()).await, Ok(first(N)));
        fs::remove_dir_all(root.path().join("pods/c")).expect("removable");
        again.prune().await;
        assert_eq!(again.assign(&"d".into()).await, Ok(first(N)));
    }

    #[tokio::test]
    async fn a_malformed_file_stops_the_start() {
        // AC-06-11
        let root = tempfile::tempdir().expect("a directory");
        fs::create_dir_all(root.path().join("pods/p")).expect("makeable");
        fs::write(root.path().join("pods/p/userns"), id_file::encode(N, N - 1)).expect("writable");
        let error = IdRanges::open(root.path(), space()).await.map(|_| ()).expect_err("malformed");
        assert_eq!(error.0, "record pod mappings for existing pod \"p\": wrong user namespace length 65535");
    }

    #[tokio::test]
    async fn a_range_that_cannot_be_written_down_is_not_given_out() {
        let root = tempfile::tempdir().expect("a directory");
        fs::write(root.path().join("pods"), "a file in the way").expect("writable");
        let shared = IdRangesInner { pods: root.path().join("pods"), table: Mutex::new(IdTable::new(space())) };
        assert!(shared.assign(&"a".into()).is_err());
        assert_eq!(shared.table().of(&"a".into()), None);
        assert!(shared.assign(&"../x".into()).is_err());
    }
}
