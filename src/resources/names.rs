//! Cgroup names in cgroupfs and systemd notation. Pure. Implements spec 06a §3.

use berth_types::{PodUid, qos::Qos};

/// `cgroupDriver`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum CgroupDriver {
    /// The agent creates directories.
    #[default]
    Cgroupfs,
    /// systemd creates slices.
    Systemd,
}

/// Why a cgroup name is invalid.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NameError {
    /// A component of the name is invalid.
    #[error("invalid cgroup name component {0:?}")]
    Component(String),
    /// The name of the slice is invalid.
    #[error("invalid slice name: {0}")]
    Slice(String),
}

/// A cgroup by its components from the root, independent of the driver.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
pub struct CgroupName(Vec<String>);

impl CgroupName {
    /// Parses `cgroupRoot`: `""` and `/` are the root.
    ///
    /// # Errors
    /// A component is empty, refers to a parent directory, or is ambiguous with an escaped name.
    pub fn root(path: &str) -> Result<Self, NameError> {
        let mut name = Self::default();
        for component in path.trim_matches('/').split('/').filter(|_| !path.trim_matches('/').is_empty()) {
            name = name.child(component)?;
        }
        Ok(name)
    }

    /// The child cgroup of that name.
    ///
    /// # Errors
    /// As [`Self::root`].
    pub fn child(&self, component: &str) -> Result<Self, NameError> {
        if matches!(component, "" | "." | "..") || component.contains(['/', '_', '\0']) {
            return Err(NameError::Component(component.to_owned()));
        }
        let mut components = self.0.clone();
        components.push(component.to_owned());
        Ok(Self(components))
    }

    /// Path below the root of a hierarchy; with systemd the chain of slices.
    pub fn path(&self, driver: CgroupDriver) -> String {
        match driver {
            CgroupDriver::Cgroupfs => format!("/{}", self.0.join("/")),
            CgroupDriver::Systemd => {
                let escaped: Vec<String> = self.0.iter().map(|c| c.replace('-', "_")).collect();
                let slices: Vec<String> =
                    (1..=escaped.len()).map(|n| format!("{}.slice", escaped[..n].join("-"))).collect();
                format!("/{}", slices.join("/"))
            }
        }
    }

    /// Parses a path in the driver's notation.
    ///
    /// # Errors
    /// The path is not valid for that driver.
    pub fn parse(path: &str, driver: CgroupDriver) -> Result<Self, NameError> {
        if driver == CgroupDriver::Cgroupfs {
            return Self::root(path);
        }
        let last = path.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
        if last.is_empty() {
            return Ok(Self::default());
        }
        let invalid = || NameError::Slice(last.to_owned());
        let parts: Vec<&str> = last.strip_suffix(".slice").ok_or_else(invalid)?.split('-').collect();
        if parts.iter().any(|part| part.is_empty()) {
            return Err(invalid());
        }
        Ok(Self(parts.into_iter().map(|part| part.replace('_', "-")).collect()))
    }
}

/// Names in the cgroup tree of pods.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PodTree {
    root: CgroupName,
    driver: CgroupDriver,
}

/// Prefix of a pod's component.
const POD_PREFIX: &str = "pod";

impl PodTree {
    /// Creates the tree below `cgroupRoot`.
    ///
    /// # Errors
    /// The root is not a valid name.
    pub fn new(cgroup_root: &str, driver: CgroupDriver) -> Result<Self, NameError> {
        Ok(Self { root: CgroupName::root(cgroup_root)?, driver })
    }

    /// The cgroup driver, which determines the notation.
    pub fn driver(&self) -> CgroupDriver {
        self.driver
    }

    /// The root cgroup.
    pub fn root(&self) -> &CgroupName {
        &self.root
    }

    /// `kubepods`.
    pub fn kubepods(&self) -> CgroupName {
        self.below_root(&["kubepods"])
    }

    /// Parent cgroup of the pods of a QoS class; for Guaranteed pods it is `kubepods` itself.
    pub fn qos(&self, class: Qos) -> CgroupName {
        match class {
            Qos::Guaranteed => self.kubepods(),
            Qos::Burstable => self.below_root(&["kubepods", "burstable"]),
            Qos::BestEffort => self.below_root(&["kubepods", "besteffort"]),
        }
    }

    /// The cgroup of a pod.
    ///
    /// # Errors
    /// The UID is not a valid component of a name.
    pub fn pod(&self, class: Qos, uid: &PodUid) -> Result<CgroupName, NameError> {
        self.qos(class).child(&format!("{POD_PREFIX}{uid}"))
    }

    /// The three possible cgroups of a pod: its QoS class may no longer be known.
    pub fn pod_anywhere(&self, uid: &PodUid) -> Vec<CgroupName> {
        CLASSES.into_iter().filter_map(|class| self.pod(class, uid).ok()).collect()
    }

    /// The UID of the pod that a directory below a QoS class belongs to; `None` for other cgroups.
    pub fn uid_of(&self, directory: &str) -> Option<PodUid> {
        let component = match self.driver {
            CgroupDriver::Cgroupfs => directory.to_owned(),
            CgroupDriver::Systemd => directory.strip_suffix(".slice")?.rsplit('-').next()?.replace('_', "-"),
        };
        // Strips only the first prefix: a UID may itself contain `pod`.
        let uid = component.strip_prefix(POD_PREFIX)?;
        (!uid.is_empty()).then(|| PodUid::from(uid))
    }

    /// Path of a name in the driver's notation.
    pub fn path(&self, name: &CgroupName) -> String {
        name.path(self.driver)
    }

    fn below_root(&self, components: &[&str]) -> CgroupName {
        let mut name = self.root.clone();
        name.0.extend(components.iter().map(|&c| c.to_owned()));
        name
    }
}

/// All QoS classes.
pub const CLASSES: [Qos; 3] = [Qos::Guaranteed, Qos::Burstable, Qos::BestEffort];

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn name(components: &[&str]) -> CgroupName {
        CgroupName(components.iter().map(|&c| c.to_owned()).collect())
    }

    #[test]
    fn a_name_has_two_notations() {
        let pod = name(&["kubepods", "burstable", "pod1234-abcd"]);
        assert_eq!(pod.path(CgroupDriver::Cgroupfs), "/kubepods/burstable/pod1234-abcd");
        // AC-06a-1
        assert_eq!(
            pod.path(CgroupDriver::Systemd),
            "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1234_abcd.slice"
        );
        assert_eq!(CgroupName::default().path(CgroupDriver::Cgroupfs), "/");
        assert_eq!(CgroupName::default().path(CgroupDriver::Systemd), "/");
        assert_eq!(name(&["kubelet", "kubepods"]).path(CgroupDriver::Systemd), "/kubelet.slice/kubelet-kubepods.slice");
    }

    #[test]
    fn slices_are_read_back() {
        let path = "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1234_abcd.slice";
        let expected = name(&["kubepods", "burstable", "pod1234-abcd"]);
        assert_eq!(CgroupName::parse(path, CgroupDriver::Systemd), Ok(expected));
        for bad in ["-a.slice", "a--b.slice", "a.scope", "/x/a-.slice"] {
            let error = CgroupName::parse(bad, CgroupDriver::Systemd).unwrap_err().to_string();
            assert!(error.starts_with("invalid slice name: "), "{error}");
        }
        assert_eq!(CgroupName::parse("/", CgroupDriver::Systemd), Ok(CgroupName::default()));
    }

    #[test]
    fn components_that_cannot_be_escaped_are_refused() {
        for bad in ["", ".", "..", "a/b", "a_b"] {
            assert!(CgroupName::default().child(bad).is_err(), "{bad}");
        }
        assert!(CgroupName::root("/a//b").is_err() && CgroupName::root("/../b").is_err());
        assert_eq!(CgroupName::root("/kubelet/x"), Ok(name(&["kubelet", "x"])));
        assert_eq!(CgroupName::root(""), Ok(CgroupName::default()));
    }

    #[test]
    fn pods_live_below_their_class() {
        let tree = PodTree::new("/kubelet", CgroupDriver::Cgroupfs).expect("a tree");
        let path = |class| tree.pod(class, &"u1".into()).map(|n| tree.path(&n)).expect("a name");
        assert_eq!(path(Qos::Guaranteed), "/kubelet/kubepods/podu1");
        assert_eq!(path(Qos::Burstable), "/kubelet/kubepods/burstable/podu1");
        assert_eq!(path(Qos::BestEffort), "/kubelet/kubepods/besteffort/podu1");
        assert!(tree.pod(Qos::Burstable, &"../x".into()).is_err());
        assert_eq!(tree.pod_anywhere(&"a/b".into()), []);
    }

    #[test]
    fn directories_of_pods_are_recognised() {
        let tree = |driver| PodTree::new("", driver).expect("a tree");
        let uid = |driver, directory| tree(driver).uid_of(directory).map(|u| u.to_string());
        assert_eq!(uid(CgroupDriver::Cgroupfs, "pod12-ab").as_deref(), Some("12-ab"));
        assert_eq!(uid(CgroupDriver::Cgroupfs, "podmy-pod").as_deref(), Some("my-pod"));
        for other in ["burstable", "besteffort", "pod", "system"] {
            assert_eq!(uid(CgroupDriver::Cgroupfs, other), None, "{other}");
        }
        assert_eq!(uid(CgroupDriver::Systemd, "kubepods-burstable-pod12_ab.slice").as_deref(), Some("12-ab"));
        assert_eq!(uid(CgroupDriver::Systemd, "kubepods-burstable.slice"), None);
        assert_eq!(uid(CgroupDriver::Systemd, "cri-containerd-x.scope"), None);
    }

    proptest! {
        #[test]
        fn both_notations_are_read_back(components in prop::collection::vec("[a-z0-9][a-z0-9-]{0,20}", 0..4)) {
            let name = CgroupName(components);
            for driver in [CgroupDriver::Cgroupfs, CgroupDriver::Systemd] {
                let back = CgroupName::parse(&name.path(driver), driver);
                prop_assert_eq!(back, Ok(name.clone()));
            }
        }
    }
}
