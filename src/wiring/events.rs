//! Node events of the agent's start.

use std::time::Duration;

use berth_ports::{EventRecord, EventSink};

/// Time for the last event of a failed start to be sent.
const LAST_EVENT: Duration = Duration::from_secs(1);

/// kubelet's event text for a node with cgroup v1 (spec 05 §7).
const CGROUP_V1: &str = "cgroup v1 detected. cgroup v1 support is deprecated and will be removed in a future release. \
                         Please migrate to cgroup v2. More information at \
                         https://git.k8s.io/enhancements/keps/sig-node/5573-remove-cgroup-v1";

/// Records the node events of a start: `Starting`, and `CgroupV1` on a deprecated hierarchy.
pub fn record_start_events(events: &dyn EventSink, is_cgroup_v1: bool) {
    events.record(EventRecord::node_normal("Starting", "Starting kubelet."));
    if is_cgroup_v1 {
        events.record(EventRecord::node_warning("CgroupV1", CGROUP_V1));
    }
}

/// Records the node event of a failed start; waits for it to be sent if there is an API server.
pub async fn record_setup_failure(events: &dyn EventSink, error: &str, has_server: bool) {
    events.record(EventRecord::node_warning("KubeletSetupFailed", error));
    if has_server {
        tokio::time::sleep(LAST_EVENT).await;
    }
}
