//! Kinds of objects and where they are served. Pure. Spec 10 §4.

/// A kind of object.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Resource {
    /// API group; empty for the core group.
    pub group: &'static str,
    /// Version within the group.
    pub version: &'static str,
    /// As it stands in paths.
    pub plural: &'static str,
    /// As it stands in objects.
    pub kind: &'static str,
}

impl Resource {
    /// Nodes.
    pub const NODES: Self = Self::core("nodes", "Node");
    /// Pods.
    pub const PODS: Self = Self::core("pods", "Pod");
    /// Config maps.
    pub const CONFIG_MAPS: Self = Self::core("configmaps", "ConfigMap");
    /// Secrets.
    pub const SECRETS: Self = Self::core("secrets", "Secret");
    /// Services.
    pub const SERVICES: Self = Self::core("services", "Service");
    /// Service accounts.
    pub const SERVICE_ACCOUNTS: Self = Self::core("serviceaccounts", "ServiceAccount");
    /// Events of the core group.
    pub const EVENTS: Self = Self::core("events", "Event");
    /// Claims of persistent volumes.
    pub const CLAIMS: Self = Self::core("persistentvolumeclaims", "PersistentVolumeClaim");
    /// Persistent volumes.
    pub const VOLUMES: Self = Self::core("persistentvolumes", "PersistentVolume");
    /// Leases.
    pub const LEASES: Self = Self::new("coordination.k8s.io", "v1", "leases", "Lease");
    /// Runtime classes.
    pub const RUNTIME_CLASSES: Self = Self::new("node.k8s.io", "v1", "runtimeclasses", "RuntimeClass");
    /// CSI drivers.
    pub const CSI_DRIVERS: Self = Self::new("storage.k8s.io", "v1", "csidrivers", "CSIDriver");
    /// What a node knows of CSI drivers.
    pub const CSI_NODES: Self = Self::new("storage.k8s.io", "v1", "csinodes", "CSINode");
    /// Attachments of volumes.
    pub const ATTACHMENTS: Self = Self::new("storage.k8s.io", "v1", "volumeattachments", "VolumeAttachment");
    /// Requests for certificates.
    pub const SIGNING_REQUESTS: Self =
        Self::new("certificates.k8s.io", "v1", "certificatesigningrequests", "CertificateSigningRequest");
    /// Requests for certificates of pods.
    pub const POD_CERTIFICATES: Self =
        Self::new("certificates.k8s.io", "v1beta1", "podcertificaterequests", "PodCertificateRequest");
    /// Trust bundles.
    pub const TRUST_BUNDLES: Self =
        Self::new("certificates.k8s.io", "v1beta1", "clustertrustbundles", "ClusterTrustBundle");
    /// The same of older servers.
    pub const TRUST_BUNDLES_ALPHA: Self =
        Self::new("certificates.k8s.io", "v1alpha1", "clustertrustbundles", "ClusterTrustBundle");
    /// Slices of devices.
    pub const RESOURCE_SLICES: Self = Self::new("resource.k8s.io", "v1", "resourceslices", "ResourceSlice");
    /// Claims of devices.
    pub const RESOURCE_CLAIMS: Self = Self::new("resource.k8s.io", "v1", "resourceclaims", "ResourceClaim");
    /// Who a token belongs to.
    pub const TOKEN_REVIEWS: Self = Self::new("authentication.k8s.io", "v1", "tokenreviews", "TokenReview");
    /// What somebody may do.
    pub const ACCESS_REVIEWS: Self =
        Self::new("authorization.k8s.io", "v1", "subjectaccessreviews", "SubjectAccessReview");

    /// Whether the server is well: no object, and text for an answer.
    pub const HEALTHZ: Self = Self::page("healthz");

    /// What the server has of certificates, by version.
    pub const CERTIFICATES_V1BETA1: Self = Self::page("apis/certificates.k8s.io/v1beta1");
    /// The same of older servers.
    pub const CERTIFICATES_V1ALPHA1: Self = Self::page("apis/certificates.k8s.io/v1alpha1");

    /// Any other.
    pub const fn new(group: &'static str, version: &'static str, plural: &'static str, kind: &'static str) -> Self {
        Self { group, version, plural, kind }
    }

    /// What is no object: it has no version, and lies at the root.
    const fn page(plural: &'static str) -> Self {
        Self::new("", "", plural, "")
    }

    const fn core(plural: &'static str, kind: &'static str) -> Self {
        Self::new("", "v1", plural, kind)
    }

    /// `apiVersion` of its objects.
    pub fn api_version(&self) -> String {
        if self.group.is_empty() { self.version.to_owned() } else { format!("{}/{}", self.group, self.version) }
    }

    /// Path below the server's prefix; `namespace`, `name` and `subresource` may be empty.
    pub fn path(&self, namespace: &str, name: &str, subresource: &str) -> String {
        if self.version.is_empty() {
            return format!("/{}", self.plural);
        }
        let root = if self.group.is_empty() { "/api" } else { "/apis" };
        let mut path = format!("{root}/{}", self.api_version());
        if !namespace.is_empty() {
            path.extend(["/namespaces/", namespace]);
        }
        path.extend(["/", self.plural]);
        for part in [name, subresource].into_iter().filter(|part| !part.is_empty()) {
            path.extend(["/", part]);
        }
        path
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_those_of_the_api() {
        for (resource, [namespace, name, subresource], expected) in [
            (Resource::NODES, ["", "n", "status"], "/api/v1/nodes/n/status"),
            (Resource::PODS, ["ns", "p", ""], "/api/v1/namespaces/ns/pods/p"),
            (Resource::PODS, ["", "", ""], "/api/v1/pods"),
            (Resource::HEALTHZ, ["", "", ""], "/healthz"),
            (
                Resource::LEASES,
                ["kube-node-lease", "", ""],
                "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases",
            ),
        ] {
            assert_eq!(resource.path(namespace, name, subresource), expected);
        }
        assert_eq!(
            (Resource::PODS.api_version(), Resource::LEASES.api_version()),
            ("v1".into(), "coordination.k8s.io/v1".into())
        );
    }
}
