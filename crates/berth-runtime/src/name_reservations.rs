//! Reservation of sandbox and container names; makes create requests idempotent.
//!
//! A name stays reserved until its object is removed. An identical request *joins* one that is in progress: both get
//! the same result. The object of an earlier identical request is returned again if it is still usable. Any other
//! request for the name is rejected. Implements spec 09 §9 (AC-09-E6).

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use tokio::sync::watch;

use super::errors::{ErrorKind, RuntimeError, RuntimeResult};

/// Result of a create request: the object's id.
pub type Outcome = RuntimeResult<String>;
/// Receives the result of a request in progress; `None` until then.
pub type PendingOutcome = watch::Receiver<Option<Outcome>>;

/// All reserved names.
#[derive(Debug)]
pub struct NameReservations<R>(Mutex<HashMap<String, Reservation<R>>>);

#[derive(Debug)]
struct Reservation<R> {
    id: String,
    /// The request that reserved the name.
    request: R,
    flight: Option<PendingOutcome>,
}

impl<R> Default for NameReservations<R> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

/// Result of a claim.
#[derive(Debug)]
pub enum Claim {
    /// The caller owns the name: it creates the object and publishes the result.
    Acquired(watch::Sender<Option<Outcome>>),
    /// An identical request is in progress: the caller waits for its result.
    InProgress(PendingOutcome),
    /// Id of an existing object from an identical request; the caller returns it if it is still usable.
    Existing(String),
}

impl<R: PartialEq> NameReservations<R> {
    fn all(&self) -> MutexGuard<'_, HashMap<String, Reservation<R>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Claims the name for an object `id` of this request.
    ///
    /// # Errors
    /// The name is reserved for a different request.
    pub fn claim(&self, name: &str, id: &str, request: R) -> RuntimeResult<Claim> {
        let mut all = self.all();
        match all.get(name) {
            None => {
                let (sender, flight) = watch::channel(None);
                let reservation = Reservation { id: id.to_owned(), request, flight: Some(flight) };
                all.insert(name.to_owned(), reservation);
                Ok(Claim::Acquired(sender))
            }
            Some(reservation) if reservation.request == request => Ok(match &reservation.flight {
                Some(flight) => Claim::InProgress(flight.clone()),
                None => Claim::Existing(reservation.id.clone()),
            }),
            Some(reservation) => Err(taken(name, &reservation.id)),
        }
    }

    /// Marks the creation as complete.
    pub fn complete(&self, name: &str) {
        if let Some(reservation) = self.all().get_mut(name) {
            reservation.flight = None;
        }
    }

    /// Reserves the name of an object that existed before the start.
    pub fn restore(&self, name: &str, id: &str, request: R) {
        self.all().insert(name.to_owned(), Reservation { id: id.to_owned(), request, flight: None });
    }

    /// Releases the name after the object was removed or its creation failed; no-op if another id owns the name.
    pub fn release(&self, name: &str, id: &str) {
        let mut all = self.all();
        if all.get(name).is_some_and(|reservation| reservation.id == id) {
            all.remove(name);
        }
    }
}

/// The error for a reserved name.
pub fn taken(name: &str, id: &str) -> RuntimeError {
    RuntimeError::new(ErrorKind::Taken, format!("name \"{name}\" is reserved for \"{id}\""))
}

/// Waits for the result of a request in progress.
///
/// # Errors
/// The error of that request, or that it was abandoned.
pub async fn join(mut flight: PendingOutcome) -> Outcome {
    match flight.wait_for(Option::is_some).await {
        Ok(outcome) => outcome.clone().unwrap_or_else(|| Err(RuntimeError::other("the request was canceled"))),
        Err(_) => Err(RuntimeError::other("the request was canceled")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn identical_requests_join_and_others_are_refused() {
        // AC-09-E6
        let names = NameReservations::default();
        let Ok(Claim::Acquired(sender)) = names.claim("n", "id1", 1) else { panic!("free") };
        let Ok(Claim::InProgress(flight)) = names.claim("n", "id2", 1) else { panic!("under way") };
        let refused = names.claim("n", "id3", 2).expect_err("another request");
        assert_eq!(refused.text, "name \"n\" is reserved for \"id1\"");
        let _ = sender.send(Some(Ok("id1".to_owned())));
        assert_eq!(join(flight).await, Ok("id1".to_owned()));
        names.complete("n");
        assert!(matches!(names.claim("n", "id4", 1), Ok(Claim::Existing(id)) if id == "id1"));
        names.release("n", "id9");
        assert!(names.claim("n", "id5", 2).is_err(), "only who has it releases it");
        names.release("n", "id1");
        assert!(matches!(names.claim("n", "id5", 2), Ok(Claim::Acquired(_))));
    }

    #[tokio::test]
    async fn joining_an_abandoned_request_fails() {
        let names = NameReservations::default();
        let Ok(Claim::Acquired(sender)) = names.claim("n", "id1", 1) else { panic!("free") };
        let Ok(Claim::InProgress(flight)) = names.claim("n", "id2", 1) else { panic!("under way") };
        drop(sender);
        assert!(join(flight).await.is_err());
    }
}
