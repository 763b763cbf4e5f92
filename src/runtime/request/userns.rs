//! User namespace of a pod: support check and ID mappings. Pure. Implements spec 03a §5.4, 06 §5.3.

use berth_proto::cri;
use berth_types::Pod;

/// A range of host IDs assigned to one pod.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HostIds {
    /// Host ID that maps to ID 0 in the pod.
    pub first: u32,
    /// Number of IDs.
    pub length: u32,
}

/// The runtime does not support user namespaces.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum UnsupportedUserNamespace {
    /// The default runtime handler does not support them.
    #[error("can't set `spec.hostUsers: false`, runtime does not support user namespaces")]
    Runtime,
    /// The handler of a RuntimeClass does not support them.
    #[error("can't set `spec.hostUsers: false`, RuntimeClass handler {0:?} does not support user namespaces")]
    Handler(String),
}

/// Whether the pod requests its own user namespace.
pub fn is_wanted(pod: &Pod) -> bool {
    pod.spec().host_users == Some(false)
}

/// Checks that the handler supports user namespaces if the pod requests one.
///
/// # Errors
/// The pod requests a user namespace and the handler does not support it.
pub fn check_support(pod: &Pod, handler: &str, supported: bool) -> Result<(), UnsupportedUserNamespace> {
    match (is_wanted(pod), supported, handler) {
        (false, ..) | (_, true, _) => Ok(()),
        (true, false, "") => Err(UnsupportedUserNamespace::Runtime),
        (true, false, handler) => Err(UnsupportedUserNamespace::Handler(handler.to_owned())),
    }
}

/// The namespace option: the node's, or the pod's own with one mapping for users and groups.
pub fn options(ids: Option<HostIds>) -> cri::UserNamespace {
    match ids {
        None => cri::UserNamespace { mode: cri::NamespaceMode::Node.into(), ..Default::default() },
        Some(ids) => cri::UserNamespace {
            mode: cri::NamespaceMode::Pod.into(),
            uids: mappings(Some(ids)),
            gids: mappings(Some(ids)),
        },
    }
}

/// The ID mappings of each mount of the pod; empty for the node's namespace.
pub fn mappings(ids: Option<HostIds>) -> Vec<cri::IdMapping> {
    ids.into_iter().map(|ids| cri::IdMapping { host_id: ids.first, container_id: 0, length: ids.length }).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(host_users: Option<bool>) -> Pod {
        let object = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"},
            "spec": {"hostUsers": host_users, "containers": [{"name": "c"}]}});
        Pod::new(serde_json::from_value(object).expect("a pod")).expect("complete")
    }

    #[test]
    fn a_handler_must_support_what_a_pod_asks_for() {
        for wanted in [None, Some(true)] {
            assert_eq!(check_support(&pod(wanted), "", false), Ok(()));
        }
        assert_eq!(check_support(&pod(Some(false)), "h", true), Ok(()));
        // AC-03a-23
        let text = |handler| check_support(&pod(Some(false)), handler, false).unwrap_err().to_string();
        assert_eq!(text(""), "can't set `spec.hostUsers: false`, runtime does not support user namespaces");
        assert_eq!(
            text("h"),
            "can't set `spec.hostUsers: false`, RuntimeClass handler \"h\" does not support user namespaces"
        );
    }

    #[test]
    fn a_pods_own_namespace_has_one_mapping() {
        let node = options(None);
        assert_eq!((node.mode(), node.uids.len()), (cri::NamespaceMode::Node, 0));
        let own = options(Some(HostIds { first: 65536, length: 65536 }));
        let mapping = cri::IdMapping { host_id: 65536, container_id: 0, length: 65536 };
        assert_eq!(own.mode(), cri::NamespaceMode::Pod);
        assert_eq!((own.uids, own.gids), (vec![mapping], vec![mapping]));
    }
}
