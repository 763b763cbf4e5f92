//! Metrics of SELinux labels of volumes: conflicts, and volumes mounted with a label; only on nodes with SELinux.
//!
//! Implements spec 08 §4.9 of `docs/spec`.

use prometheus::IntGaugeVec;

use super::{Registry, Stability::Alpha};

/// Kind of SELinux label conflict.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LabelConflict {
    /// A container requests an invalid label.
    Container,
    /// Containers of a pod request different labels.
    Pod,
    /// Pods that share a volume request different labels.
    Volume,
}

/// Error gauge and warning gauge.
type Pair = [IntGaugeVec; 2];

/// Metric handles of SELinux labels.
#[derive(Clone, Debug)]
pub struct SelinuxMetrics {
    container: Pair,
    pod: Pair,
    volume: Pair,
    admitted: IntGaugeVec,
}

impl SelinuxMetrics {
    /// Registers the families.
    pub fn new(registry: &Registry) -> Self {
        let pair = |name: &str, error: &str, warning: &str, labels: &[&str]| {
            let gauge = |kind: &str, help: &str| {
                registry.gauges(Alpha, &format!("volume_manager_selinux_{name}_{kind}_total"), help, labels)
            };
            [gauge("errors", error), gauge("warnings", warning)]
        };
        let (mode, both) = (["access_mode"], ["volume_plugin", "access_mode"]);
        Self {
            container: pair(
                "container",
                "Number of errors when kubelet cannot compute SELinux context for a container. Kubelet can't start such a Pod then and it will retry, therefore value of this metric may not represent the actual nr. of containers.",
                "Number of errors when kubelet cannot compute SELinux context for a container that are ignored. They will become real errors when SELinuxMountReadWriteOncePod feature is expanded to all volume access modes.",
                &mode,
            ),
            pod: pair(
                "pod_context_mismatch",
                "Number of errors when a Pod defines different SELinux contexts for its containers that use the same volume. Kubelet can't start such a Pod then and it will retry, therefore value of this metric may not represent the actual nr. of Pods.",
                "Number of errors when a Pod defines different SELinux contexts for its containers that use the same volume. They are not errors yet, but they will become real errors when SELinuxMountReadWriteOncePod feature is expanded to all volume access modes.",
                &mode,
            ),
            volume: pair(
                "volume_context_mismatch",
                "Number of errors when a Pod uses a volume that is already mounted with a different SELinux context than the Pod needs. Kubelet can't start such a Pod then and it will retry, therefore value of this metric may not represent the actual nr. of Pods.",
                "Number of errors when a Pod uses a volume that is already mounted with a different SELinux context than the Pod needs. They are not errors yet, but they will become real errors when SELinuxMountReadWriteOncePod feature is expanded to all volume access modes.",
                &both,
            ),
            admitted: registry.gauges(
                Alpha,
                "volume_manager_selinux_volumes_admitted_total",
                "Number of volumes whose SELinux context was fine and will be mounted with mount -o context option.",
                &both,
            ),
        }
    }

    /// Counts a conflict: an error if the volume is withheld from the pod, otherwise a warning.
    pub fn conflict(&self, odds: LabelConflict, is_error: bool, plugin: &str, mode: &str) {
        let pair = match odds {
            LabelConflict::Container => &self.container,
            LabelConflict::Pod => &self.pod,
            LabelConflict::Volume => &self.volume,
        };
        let [errors, warnings] = pair;
        let family = if is_error { errors } else { warnings };
        match odds {
            LabelConflict::Volume => family.with_label_values(&[plugin, mode]).inc(),
            LabelConflict::Container | LabelConflict::Pod => family.with_label_values(&[mode]).inc(),
        }
    }

    /// Counts a volume mounted with an SELinux label.
    pub fn admitted(&self, plugin: &str, mode: &str) {
        self.admitted.with_label_values(&[plugin, mode]).inc();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_oddity_has_its_family() {
        let registry = Registry::new();
        let metrics = SelinuxMetrics::new(&registry);
        for odds in [LabelConflict::Container, LabelConflict::Pod, LabelConflict::Volume] {
            for is_error in [true, false, false] {
                metrics.conflict(odds, is_error, "kubernetes.io/csi/d", "RWOP");
            }
        }
        metrics.admitted("kubernetes.io/csi/d", "RWO");
        let families = registry.gather();
        let series: Vec<(&str, f64, Vec<&str>)> = families
            .iter()
            .map(|family| {
                let metric = &family.get_metric()[0];
                let labels = metric.get_label().iter().map(|label| label.value()).collect();
                (family.name(), metric.get_gauge().get_value(), labels)
            })
            .collect();
        let both = || vec!["RWOP", "kubernetes.io/csi/d"];
        assert_eq!(
            series,
            [
                ("volume_manager_selinux_container_errors_total", 1.0, vec!["RWOP"]),
                ("volume_manager_selinux_container_warnings_total", 2.0, vec!["RWOP"]),
                ("volume_manager_selinux_pod_context_mismatch_errors_total", 1.0, vec!["RWOP"]),
                ("volume_manager_selinux_pod_context_mismatch_warnings_total", 2.0, vec!["RWOP"]),
                ("volume_manager_selinux_volume_context_mismatch_errors_total", 1.0, both()),
                ("volume_manager_selinux_volume_context_mismatch_warnings_total", 2.0, both()),
                ("volume_manager_selinux_volumes_admitted_total", 1.0, vec!["RWO", "kubernetes.io/csi/d"]),
            ]
        );
    }
}
