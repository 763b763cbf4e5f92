//! Table of API resources of the test API server, their properties, paths, and discovery.
//!
//! Implements spec 10a §1, §2, §3.

use serde_json::{Value, json};

use super::refusal::split;

/// API resource type.
#[derive(Debug)]
pub struct Kind {
    /// Resource name: `pods`, `leases.coordination.k8s.io`.
    pub id: &'static str,
    /// Version: `v1`.
    pub version: &'static str,
    /// Kind: `Pod`.
    pub kind: &'static str,
    /// Short names for kubectl: `po`.
    pub short: &'static [&'static str],
    /// Whether objects are namespaced.
    pub is_namespaced: bool,
    /// Subresources: `status`, `token`, …
    pub subresources: &'static [&'static str],
    /// Selectable fields besides name and namespace.
    pub fields: &'static [&'static str],
    /// Whether a DELETE returns the object.
    pub returns_deleted: bool,
    /// Whether a PUT without a resource version updates unconditionally.
    pub is_unconditional: bool,
    /// Whether a PUT creates a missing object.
    pub is_made_by_put: bool,
    /// Whether objects are stored; the others are reviews, which only answer a create.
    pub is_stored: bool,
}

impl Kind {
    const fn new(id: &'static str, version: &'static str, kind: &'static str) -> Self {
        Self {
            id,
            version,
            kind,
            short: &[],
            is_namespaced: true,
            subresources: &[],
            fields: &[],
            returns_deleted: false,
            is_unconditional: false,
            is_made_by_put: false,
            is_stored: true,
        }
    }

    const fn short(mut self, short: &'static [&'static str]) -> Self {
        self.short = short;
        self
    }

    const fn cluster(mut self) -> Self {
        self.is_namespaced = false;
        self
    }

    const fn subs(mut self, subresources: &'static [&'static str]) -> Self {
        self.subresources = subresources;
        self
    }

    const fn by(mut self, fields: &'static [&'static str]) -> Self {
        self.fields = fields;
        self
    }

    const fn returned(mut self) -> Self {
        self.returns_deleted = true;
        self
    }

    const fn unconditional(mut self) -> Self {
        self.is_unconditional = true;
        self
    }

    const fn by_put(mut self) -> Self {
        self.is_made_by_put = true;
        self
    }

    const fn question(mut self) -> Self {
        self.is_stored = false;
        self.is_namespaced = false;
        self
    }

    /// Plural name: `leases`.
    pub fn plural(&self) -> &'static str {
        split(self.id).0
    }

    /// API group: `coordination.k8s.io`; empty for the core group.
    pub fn group(&self) -> &'static str {
        split(self.id).1
    }

    /// API version: `coordination.k8s.io/v1`.
    pub fn api_version(&self) -> String {
        match self.group() {
            "" => self.version.to_owned(),
            group => format!("{group}/{}", self.version),
        }
    }

    /// URL path: `/api/v1/namespaces/ns/pods/p/status`; empty parts are left out.
    pub fn path(&self, namespace: &str, name: &str, subresource: &str) -> String {
        let root = if self.group().is_empty() { "/api" } else { "/apis" };
        let mut path = format!("{root}/{}", self.api_version());
        if self.is_namespaced && !namespace.is_empty() {
            path = format!("{path}/namespaces/{namespace}");
        }
        for part in [self.plural(), name, subresource].into_iter().filter(|part| !part.is_empty()) {
            path = format!("{path}/{part}");
        }
        path
    }

    fn listed(&self) -> Vec<Value> {
        let verbs: &[&str] = match self.is_stored {
            true => &["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"],
            false => &["create"],
        };
        let own = json!({"name": self.plural(), "singularName": self.kind.to_lowercase(), "kind": self.kind,
                         "namespaced": self.is_namespaced, "verbs": verbs, "shortNames": self.short});
        let subresource = |sub: &&str| {
            let (kind, verbs): (&str, &[&str]) = match *sub {
                "token" => ("TokenRequest", &["create"]),
                "binding" => ("Binding", &["create"]),
                "eviction" => ("Eviction", &["create"]),
                "log" => (self.kind, &["get"]),
                "exec" => ("PodExecOptions", &["create", "get"]),
                "attach" => ("PodAttachOptions", &["create", "get"]),
                "portforward" => ("PodPortForwardOptions", &["create", "get"]),
                _ => (self.kind, &["get", "patch", "update"]),
            };
            json!({"name": format!("{}/{sub}", self.plural()), "singularName": "", "kind": kind,
                   "namespaced": self.is_namespaced, "verbs": verbs})
        };
        std::iter::once(own).chain(self.subresources.iter().map(subresource)).collect()
    }
}

const CERTIFICATES: &str = "certificatesigningrequests.certificates.k8s.io";
const POD_FIELDS: &[&str] = &[
    "spec.nodeName",
    "spec.restartPolicy",
    "spec.schedulerName",
    "spec.serviceAccountName",
    "spec.hostNetwork",
    "status.phase",
    "status.podIP",
    "status.podIPs",
    "status.nominatedNodeName",
];
const EVENT_FIELDS: &[&str] = &[
    "involvedObject.kind",
    "involvedObject.namespace",
    "involvedObject.name",
    "involvedObject.uid",
    "involvedObject.apiVersion",
    "involvedObject.resourceVersion",
    "involvedObject.fieldPath",
    "reason",
    "reportingComponent",
    "source",
    "type",
];
const POD_SUBS: &[&str] =
    &["status", "binding", "eviction", "resize", "ephemeralcontainers", "log", "exec", "attach", "portforward"];

/// All resources.
pub static KINDS: &[Kind] = &[
    Kind::new("namespaces", "v1", "Namespace").cluster().short(&["ns"]).subs(&["status"]).returned().unconditional(),
    Kind::new("nodes", "v1", "Node")
        .cluster()
        .short(&["no"])
        .subs(&["status"])
        .by(&["spec.unschedulable"])
        .unconditional(),
    Kind::new("pods", "v1", "Pod").short(&["po"]).subs(POD_SUBS).by(POD_FIELDS).returned().unconditional(),
    Kind::new("events", "v1", "Event").short(&["ev"]).by(EVENT_FIELDS).unconditional().by_put(),
    Kind::new("configmaps", "v1", "ConfigMap").short(&["cm"]).unconditional(),
    Kind::new("secrets", "v1", "Secret").by(&["type"]).unconditional(),
    Kind::new("services", "v1", "Service")
        .short(&["svc"])
        .subs(&["status"])
        .by(&["spec.clusterIP", "spec.type"])
        .returned()
        .unconditional(),
    Kind::new("serviceaccounts", "v1", "ServiceAccount").short(&["sa"]).subs(&["token"]).returned(),
    Kind::new("persistentvolumeclaims", "v1", "PersistentVolumeClaim")
        .short(&["pvc"])
        .subs(&["status"])
        .returned()
        .unconditional(),
    Kind::new("persistentvolumes", "v1", "PersistentVolume")
        .cluster()
        .short(&["pv"])
        .subs(&["status"])
        .returned()
        .unconditional(),
    Kind::new("leases.coordination.k8s.io", "v1", "Lease").by_put(),
    Kind::new("csinodes.storage.k8s.io", "v1", "CSINode").cluster(),
    Kind::new("csidrivers.storage.k8s.io", "v1", "CSIDriver").cluster(),
    Kind::new("volumeattachments.storage.k8s.io", "v1", "VolumeAttachment").cluster().subs(&["status"]),
    Kind::new("runtimeclasses.node.k8s.io", "v1", "RuntimeClass").cluster(),
    Kind::new(CERTIFICATES, "v1", "CertificateSigningRequest")
        .cluster()
        .short(&["csr"])
        .subs(&["status", "approval"])
        .by(&["spec.signerName"])
        .unconditional(),
    Kind::new("podcertificaterequests.certificates.k8s.io", "v1beta1", "PodCertificateRequest")
        .subs(&["status"])
        .by(&["spec.nodeName", "spec.podName", "spec.signerName"]),
    Kind::new("clustertrustbundles.certificates.k8s.io", "v1beta1", "ClusterTrustBundle")
        .cluster()
        .by(&["spec.signerName"]),
    Kind::new("resourceclaims.resource.k8s.io", "v1", "ResourceClaim").subs(&["status"]).unconditional(),
    Kind::new("resourceslices.resource.k8s.io", "v1", "ResourceSlice")
        .cluster()
        .by(&["spec.nodeName", "spec.driver"])
        .unconditional(),
    Kind::new("tokenreviews.authentication.k8s.io", "v1", "TokenReview").question(),
    Kind::new("subjectaccessreviews.authorization.k8s.io", "v1", "SubjectAccessReview").question(),
];

/// The resource with that name: `pods`, `leases.coordination.k8s.io`.
pub fn named(id: &str) -> Option<&'static Kind> {
    KINDS.iter().find(|kind| kind.id == id)
}

/// The resource of an object, by its kind and apiVersion.
pub fn of(object: &Value) -> Option<&'static Kind> {
    KINDS.iter().find(|kind| object["kind"] == kind.kind && object["apiVersion"] == kind.api_version())
}

/// Object or collection that a path names.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ObjectPath {
    /// Namespace; empty for cluster-scoped objects.
    pub namespace: String,
    /// Object name; empty for collections.
    pub name: String,
    /// Subresource; empty for the object itself.
    pub subresource: String,
}

/// Parses a URL path into resource and object; `None` if it names none.
pub fn at(path: &str) -> Option<(&'static Kind, ObjectPath)> {
    let parts: Vec<String> = path.split('/').filter(|part| !part.is_empty()).map(decoded).collect();
    let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
    let (group, version, rest) = match parts.as_slice() {
        ["api", version, rest @ ..] => ("", *version, rest),
        ["apis", group, version, rest @ ..] => (*group, *version, rest),
        _ => return None,
    };
    let (namespace, rest) = match rest {
        ["namespaces", namespace, plural, rest @ ..] if *plural != "status" => {
            (*namespace, [&[*plural], rest].concat())
        }
        rest => ("", rest.to_vec()),
    };
    let (plural, name, subresource) = match rest.as_slice() {
        [plural] => (*plural, "", ""),
        [plural, name] => (*plural, *name, ""),
        [plural, name, subresource] => (*plural, *name, *subresource),
        _ => return None,
    };
    let is_it = |k: &&Kind| k.group() == group && k.version == version && k.plural() == plural;
    let kind = KINDS.iter().find(is_it)?;
    let fits = (namespace.is_empty() || kind.is_namespaced)
        && (subresource.is_empty() || kind.subresources.contains(&subresource))
        && (name.is_empty() || !kind.is_namespaced || !namespace.is_empty());
    let [namespace, name, subresource] = [namespace, name, subresource].map(str::to_owned);
    fits.then_some((kind, ObjectPath { namespace, name, subresource }))
}

/// Decodes percent escapes of a path segment.
fn decoded(part: &str) -> String {
    let escaped = part.replace('+', "%2B");
    form_urlencoded::parse(escaped.as_bytes()).next().map(|(key, _)| key.into_owned()).unwrap_or_default()
}

/// Discovery documents: `/api`, `/apis`, `/api/v1`, `/apis/group`, `/apis/group/version`.
pub fn discovery(path: &str) -> Option<Value> {
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
    match parts.as_slice() {
        ["api"] => Some(json!({"kind": "APIVersions", "versions": ["v1"]})),
        ["apis"] => {
            let mut groups: Vec<&str> = KINDS.iter().map(Kind::group).filter(|group| !group.is_empty()).collect();
            groups.sort_unstable();
            groups.dedup();
            let groups: Vec<Value> = groups.into_iter().filter_map(group).collect();
            Some(json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}))
        }
        ["api", version] => version_page("", version),
        ["apis", name] => {
            let mut page = group(name)?;
            (page["kind"], page["apiVersion"]) = (json!("APIGroup"), json!("v1"));
            Some(page)
        }
        ["apis", group, version] => version_page(group, version),
        _ => None,
    }
}

fn group(name: &str) -> Option<Value> {
    let mut versions: Vec<&str> = KINDS.iter().filter(|kind| kind.group() == name).map(|kind| kind.version).collect();
    versions.sort_unstable();
    versions.dedup();
    let one = |version: &&str| json!({"groupVersion": format!("{name}/{version}"), "version": version});
    let versions: Vec<Value> = versions.iter().map(one).collect();
    let preferred = versions.first()?.clone();
    Some(json!({"name": name, "versions": versions, "preferredVersion": preferred}))
}

fn version_page(group: &str, version: &str) -> Option<Value> {
    let own: Vec<&Kind> = KINDS.iter().filter(|kind| kind.group() == group && kind.version == version).collect();
    let name = own.first()?.api_version();
    let resources: Vec<Value> = own.into_iter().flat_map(Kind::listed).collect();
    Some(json!({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": name, "resources": resources}))
}
