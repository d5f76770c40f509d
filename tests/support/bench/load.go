// load sends chat requests to an OpenAI server and prints what it measured, as JSON.
//
//	load -url http://127.0.0.1:8080 -model tiny -clients 8 -requests 100 [-stream] [-tokens 64]
//
// It is not in Python, since the client would then cost more than what is measured.
package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"sort"
	"strings"
	"sync"
	"time"
)

type answer struct {
	first, last time.Duration
	pieces      int
	problem     string
}

func ask(client *http.Client, url string, body []byte, stream bool) (found answer) {
	began := time.Now()
	response, err := client.Post(url+"/v1/chat/completions", "application/json", bytes.NewReader(body))
	if err != nil {
		found.problem = err.Error()
		return
	}
	defer response.Body.Close()
	if response.StatusCode != 200 {
		text, _ := io.ReadAll(io.LimitReader(response.Body, 200))
		found.problem = fmt.Sprintf("%d %s", response.StatusCode, text)
		return
	}
	if !stream {
		if _, err = io.Copy(io.Discard, response.Body); err != nil {
			found.problem = err.Error()
		}
		found.last = time.Since(began)
		return
	}
	done := false
	lines := bufio.NewScanner(response.Body)
	lines.Buffer(make([]byte, 1<<16), 1<<20)
	for lines.Scan() {
		line := lines.Text()
		if line == "data: [DONE]" {
			done = true
		} else if strings.HasPrefix(line, "data: ") && strings.Contains(line, `"content":"`) {
			found.last = time.Since(began)
			if found.pieces == 0 {
				found.first = found.last
			}
			found.pieces++
		}
	}
	if err := lines.Err(); err != nil {
		found.problem = err.Error()
	} else if !done {
		found.problem = "cut"
	}
	return
}

func median(values []float64) float64 {
	if len(values) == 0 {
		return 0
	}
	sort.Float64s(values)
	return values[len(values)/2]
}

func main() {
	url := flag.String("url", "", "server")
	model := flag.String("model", "tiny", "model")
	clients := flag.Int("clients", 1, "requests at the same time")
	requests := flag.Int("requests", 10, "requests in all")
	stream := flag.Bool("stream", false, "stream the answers")
	tokens := flag.Int("tokens", 8, "max_tokens")
	flag.Parse()
	body, _ := json.Marshal(map[string]any{
		"model": *model, "stream": *stream, "max_tokens": *tokens, "temperature": 0, "ignore_eos": true,
		"messages": []map[string]string{{"role": "user", "content": "hello"}},
	})
	transport := &http.Transport{MaxIdleConnsPerHost: *clients}
	client := &http.Client{Transport: transport, Timeout: 5 * time.Minute}
	answers := make([]answer, *requests)
	next := make(chan int)
	var group sync.WaitGroup
	began := time.Now()
	for range *clients {
		group.Add(1)
		go func() {
			defer group.Done()
			for index := range next {
				answers[index] = ask(client, *url, body, *stream)
			}
		}()
	}
	for index := range *requests {
		next <- index
	}
	close(next)
	group.Wait()
	seconds := time.Since(began).Seconds()
	var first, each []float64
	problems := map[string]int{}
	for _, found := range answers {
		if found.problem != "" {
			problems[found.problem]++
			continue
		}
		if *stream && found.pieces > 1 {
			first = append(first, found.first.Seconds())
			each = append(each, (found.last-found.first).Seconds()/float64(found.pieces-1))
		}
	}
	json.NewEncoder(os.Stdout).Encode(map[string]any{
		"seconds": seconds, "perSecond": float64(*requests) / seconds, "first": median(first), "each": median(each),
		"problems": problems, "requests": *requests,
	})
}
